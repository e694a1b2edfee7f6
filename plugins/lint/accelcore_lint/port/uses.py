"""What the text of a file needs of the objects that a port would replace: torch's scaler, its optimizers, apex."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from accelcore_lint.port.engines import engine_in
from accelcore_lint.port.vendors import DEVICES

_DEVICES = "|".join(DEVICES)
FORKS = re.compile(
    r"(?:(?<!Settings\()start_method *= *|get_context\(|set_start_method\()[\"']fork[\"']|\bos\.fork\("
    r"|\bclass \w+\((?:\w+\.)*Process\)"
)
"""Lines that fork processes, or choose to, and classes of processes; apart from wandb's settings."""

_USES = {
    "scaler": re.compile(
        r"scaler\w*\.(?:get_(?!scale\b)\w+|set_growth_\w+|set_backoff_\w+|_\w+)\b|scaler\w*\.update\([^)]"
        r"|scaler\w*\.state_dict\(\)\[|scaler\w*\.scale\(\[|isinstance\([^()]*GradScaler"
    ),
    "scale": re.compile(r"scaler\w*\.state_dict\(\)\[|\.state_dict\(\)\[[\"']scale[\"']\]"),
    "scaled": re.compile(
        r"(?s)\A(?!.*\bunscale_\()(?=.*\bGradScaler\b).*(?:clip_grad_|\.grad\b(?! *(?:= *None|is\b)))"
    ),
    "optimizer": re.compile(
        r"\bsparse\s*=\s*(?!False\b|=)|\bSparseAdam\b|\bFullyShardedDataParallel\b|\bfully_shard\b"
        r"|\bFP16_Optimizer\b|\bLARC\b|\bLookahead\b|\bSWA\(|\bisinstance\([^()]*\bopt|\btype\([\w.]*opt|\bopt\w*\.__class__"
        r"|\bopt\w*\.(?:state|_\w+|defaults)\b(?!_dict)|(?:\bis(?: not)?|[!=]=) (?:torch\.)?optim\.\w"
        r"|\b(?:deepspeed|horovod|byteps|colossalai|fairscale)\b"
        r"|(?m:^)[ \t]*(?:import|from)[ \t]+[^\n#]*\b(?:higher|torchopt|opacus|torchcontrib)\b"
        r"|= *list\([\w.]+\.state_dict\(\)\.(?:values|items)\(\)\)|= *\[(\w+)\.(?:data|detach\(\)) for \1 in\b"
        r"|= *\{[^{}\n]*: *\w+\.(?:data|detach\(\)) for\b|self\.\w+ *= *[\w.]+\.(?:weight|bias)\.data *(?:#|\n)"
    ),
    "wrapper": re.compile(
        r"\.module\b|\.no_sync\(|\.require_backward_grad_sync\b|\.register_comm_hook\(|\._set_static_graph\("
    ),
    "text_to": re.compile(
        r"\bdef to\(self, *(\w+)[^)]*\)(?:(?!\n *def )[\s\S])*?"
        r"(?:\b\1 *[!=]= *[\"']|\b\1\.(?:split|startswith|lower)\(|[\"'] in \1\b)"
    ),
    "numbered": re.compile(r"(?i)dev\w*\.r?split\([\"']:[\"']\)|\bint\([\w.]*dev\w*\[-1\]\)"),
    "is_cuda": re.compile(r"\bdef is_(?:cuda|npu)\b|\.is_(?:cuda|npu) *=[^=]"),
    "event": re.compile(
        r"\bcuda\.Event\b(?!\((?:enable_timing *= *\w+)?\))|\bfrom torch\.cuda import[^\n]*\bEvent\b"
        r"|\b(?:CUDAGraph|cuda_event|ipc_handle|cupy|numba|tensorrt)\b|\.cuda\.graph\b"
    ),
    "stream": re.compile(rf"\.({_DEVICES})_stream\b"),
    "get_device": re.compile(r"(?m)^[ \t]+def get_device\b"),
    "apex": re.compile(r"\b_amp_state\b|\b_amp_stash\b|\bamp\._\w|\bamp\.init\("),
    "autocast": re.compile(
        r"(?m)^[ \t]*(?:from|import)[ \t]+(?:accelerate|lightning|pytorch_lightning|lightning_fabric)\b"
        r"|^[ \t]*from[ \t]+transformers\b[^\n]*\bimport[ \t]+(?:\([^()]*|[^\n#(]*)Trainer\b"
    ),
    "dtype": re.compile(r"\bset_autocast_(?:gpu_)?dtype\("),
    "graphs": re.compile(r"(?m)^[ \t]*(?:from|import)[ \t]+torch_geometric\b"),
    "fork": FORKS,
    "hidden": re.compile(r"(?m)^[ \t]+[^\n#]*_VISIBLE_DEVICES[\"'](?:\] *=|,) *[\"'](?:-1)?[\"']"),
    "spelled": re.compile(
        rf"str\([^()]*\) *[!=]= *[\"']({_DEVICES})[\"']|[!=]= *torch\.device\([\"']({_DEVICES})[\"']\)"
        rf"|torch\.device\([\"']({_DEVICES})[\"']\) *[!=]="
    ),
    "hides": re.compile(r"_VISIBLE_DEVICES[\"'](?:\] *=[^=]| *,)"),
    "early": re.compile(
        r"VISIBLE_DEVICES|\bmultiprocessing\b|\bProcess\(|\b(?:Thread|Process)?Pool(?:Executor)?\(|\bos\.fork\b"
        r"|(?m:^)[ \t]*(?:import|from)[ \t]+(?:concurrent|joblib|submitit|ray|dask|parsl|celery|gunicorn)\b"
    ),
    "located": re.compile(
        r"\bmap_location *= *(?:str\()?(?!None\b|lambda\b|torch\.)(?:\w+\.)*\w+ *[,)\n]"
        r"|\btorch\.load\([^\n]*, *(?:\w+\.)*\w*(?:dev|loc)\w* *[,)]"
    ),
}
"""Uses that only the original's objects allow, by the kind of the object.

- scaler: torch's own methods, attributes and arguments.
- scale: entries of a scaler's state, which is empty if the scaler is off.
- scaled: gradients that are read while they are multiplied by the loss scale: no line divides them before.
- optimizer: sparse gradients, a sharded model, questions for the class, the state in torch's form, a library that
  wraps it, and lists of the parameters' tensors, whose memory a fused optimizer no longer uses.
- wrapper: what DistributedDataParallel has and a model that is not wrapped has not.
- text_to: a method `to` of the project's own that takes a device by its name only.
- numbered: lines that read the index in a device's name.
- is_cuda: a truth value or a property of the project's own.
- stream: the address of a stream, which libraries of one vendor take.
- get_device: a method of the project's own by the name of a tensor's.
- apex: the private state of apex's mixed precision, which is one for the whole program, or its old `amp.init()`; or an
  import of apex without which the program goes on.
- autocast: a library that may compute in mixed precision on the CPU, too, which CUDA's autocast leaves as it is.
- dtype: another default type of autocast than float16.
- graphs: objects of PyTorch Geometric, which have `is_cuda` and no `device`.
- fork: processes of the project that cannot use CUDA if their parent has asked for it.
- hidden: a condition below which all devices are hidden, so that the answer of CUDA is that there is none.
- spelled: comparisons of a device with one that has no index, which the same device with an index does not equal.
- hides: lines that hide devices by an environment variable.
- early: lines that hide devices or start processes, before which an import must not ask for a device.
- located: a `map_location` by the name of a device, which may not be "cpu:0".
"""

ASSERTED = re.compile(
    rf"\b(?:assert\b[^\n#]*|if\b[^\n#]*\bnot )\bin *[\[({{][^\])}}]*[\"']({_DEVICES})[\"']"
    rf"|\bassert\b[^\n#]*\w(?<!\.type) *== *[\"']({_DEVICES})[\"']"
    rf"|\bif\b[^\n#]*\w(?<!\.type) *!= *[\"']({_DEVICES})[\"'][^\n#]*:\s*raise\b"
)
"""A line that stops for other names of devices than those of a list, or than these."""

HIDDEN = (
    "a file of the project hides all devices by CUDA_VISIBLE_DEVICES, which others do not read: ask an option instead"
)

_FROM = re.compile(r"(?m)^[ \t]*from[ \t]+(?!apex\b|accelcore\b)([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)")
_DRIVERS = re.compile(r"mm(cv|engine)\b")
_APEX = re.compile(r"(?m)^[ \t]*(?:from|import)[ \t]+apex\b")
STOPS = re.compile(r"\b(raise|exit|_exit|abort)\b")
"""Words of statements that end a program."""

_VENDOR = re.compile(rf"\.({_DEVICES})[(.]|[\"']({_DEVICES})\b")
_TEST = re.compile(r"[ \t]*(?:el)?if\b(.+?):([^:]*)$")
_CHOICE = re.compile(r"\bif (.+?) else\b")
_ASKED = re.compile(r"(\w+) *= *[^\n]*\bis_available\(")
_ANSWER = re.compile(r"(?m)\b(\w+) *= *[\w.]+\.is_available\(\) *(?:#.*)?$")
"""A name for nothing but the answer whether there is a device, which no option turns off."""

_FLAG = re.compile(r"(\.|(?<![.\w\"']))\b(\w+)\b(?![.(\"'])")
_LOADS = re.compile(r"map_location *= *\(?(?:None if ([^\n]+?) else|[^\n]*[\"']cpu[\"'] if ([^\n]+?) else None)\b")
"""Choices of a `map_location` that is None under a condition."""

_CHOSEN_BY = re.compile(rf"[\"'](?:{_DEVICES})(?::\d+)?[\"']\)? if ([^\n]+?) else (?:torch\.device\()?[\"']cpu[\"']")
_ABOUT = re.compile(r"(?i)gpu|cuda|cpu|device")
_ASSIGNED = re.compile(rf"\bdevice *= *[^\n]*[\"'](?:{_DEVICES})\b")
_OFF = re.compile(
    r"\b(\w+)(?:[\"']\]?)? *[=:] *False\b|\bstore_false\b[^\n]*\bdest *= *[\"'](\w+)"
    r"|[\"']--([\w-]+)[\"'][^\n]*\bstore_true\b(?![^\n]*default *= *True)"
)
"""Lines by which a flag is off, also unless the command line turns it on."""

PASSED = re.compile(r"[(,]\s*(\w+)=(?:\w+\.)*(?!\1\b)(\w+)\s*(?=[,)])")
"""Parameters by which something of another name is passed on, as in `f(use_cuda=args.gpu)`."""

_SET = re.compile(r"(?m)^[ \t]*(\w+) *=(?!=)")

REFERS = r"[\w.]*(?:optim|sched)\w*"
"""A name by which another function may know an optimizer, or a schedule that holds it."""

_COPY = re.compile(
    r"\b(?:torch\.save|(?:copy\.)?deepcopy|copy\.copy|pickle\.dumps?)"
    r"(\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\))"
)
"""Calls that pickle or copy objects, with their arguments."""

_NAME = re.compile(r"\w+(?![\w.])")
_LITERAL = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_LOADS_SCALER = re.compile(r"scaler\w*\.load_state_dict\(")

_CPU_OR_CUDA = re.compile(r"(?m)^(?:import|from)[ \t]+(horovod|byteps)(?:\.torch\b|[ \t]+import[ \t]+torch\b|[ \t]*$)")
"""Libraries that exchange tensors of the CPU and of CUDA only, if a file cannot do without them."""

_BY_MPI = re.compile(
    r"(?s)\b(mpi4py)\b.*\.(?=[A-Z])(?i:i?(?:all)?(?:reduce|gather|scatter|bcast|send|recv)\w*)\("
    r"(?=[^\n]*(?:grad|param|weight|tensor|\.data\b))(?![^\n]*numpy)"
)
"""Calls such as `comm.Allreduce(MPI.IN_PLACE, p.grad)`, which take memory and not objects, for what may be a tensor."""

RANKS = re.compile(
    r"(?m)^[ \t]*(?:from|import)[ \t]+mpi4py\b|\.Get_rank\("
    r"|[\"'](?!LOCAL_RANK\b|SLURM_LOCALID\b|OMPI_COMM_WORLD_LOCAL_RANK\b)[A-Z0-9_]*LOCAL_?(?:RANK|ID)[A-Z]*[\"']"
    r"|\benviron(?:\[|\.setdefault\()[\"'](?:MASTER_ADDR|RANK|LOCAL_RANK|WORLD_SIZE)[\"'](?:\] *=(?!=)|,) *"
    r"(?! |[\"'](?:localhost|127\.0\.0\.1|\d+)[\"'])"
)
"""Lines that number processes by MPI or a launcher that accelcore does not know, or set the launcher's variables."""

OF_DEVICE = ("read", "set", "declared")
_SETTINGS = r"\b(?:args?|cfg|conf|configs?|opts?|options?|h?params)"
_OF_DEVICE = (
    re.compile(rf"{_SETTINGS}(?:\.\w+)?(?:\.device\b|(?:\[|\.get\()[\"']device[\"'][\]),])(?! *=[^=])"),
    re.compile(
        r"(?m)(?<!self)\.device *=(?!=)|(?<!\.get\()[\"']device[\"'](?!\])|[\"']device[\"']\] *=(?!=)|^[ \t]+device *:"
    ),
    re.compile(r"--device\b(?![^()]*=[\"']cpu\b)"),
)

NUMBERS = re.compile(
    rf"[\"'](?:{_DEVICES}):(?:[1-9{{%]|[\"'] *(?:\+|\.format))|torch\.device\([\"'](?:{_DEVICES})[\"'], *(?!0\b)"
    rf"|\.(?:{_DEVICES})\((?:device=)?(?!\)|non_blocking|async|0\b|None)|--\w*device\b(?![^()]*=[\"']cpu\b)"
)
"""Lines by which an object may be on another device than the current one: by its number, or by an option."""

TAKES_REST = re.compile(r"\bnot [\w.]+\.is_cuda\b[^\n]*:\s*\n[^\n]*_cpu\w*[.(]")
"""Conditions by which a compiled function for the CPU gets each tensor that is not CUDA's."""

_HIDING = re.compile(
    r"(?m)^[ \t]*if\b(.*):[ \t]*\n[ \t]*os\.environ\[[\"'](?:CUDA|ASCEND_RT)_VISIBLE_DEVICES[\"']\] *="
)
_MEMBER = re.compile(r"\.(\w+)")
_TYPES = re.compile(
    r"= *torch\.cuda(?:\.\w+Tensor)? if (?:not )?((?:\w+\.)*\w+) else\b"
    r"|(?m:^)([ \t]*)if ((?:\w+\.)*\w+):[ \t]*\n\2[ \t]+[\w.]+ *= *torch\.cuda\.\w+Tensor[ \t]*\n"
)

BY_PLACE = re.compile(r"\bint\((?:\w+\.)*\w*device\w*\[[1-9]\d*:?\]\)")
"""A number in a device's name, found by its place behind `cuda:`."""

_GROUPS = re.compile(
    r"(?m)^([ \t]*)elif [^\n]*\b(?:mps|xpu)\b[^\n]*:\n(?:\1[ \t][^\n]*\n)*?\1[ \t][^\n]*\binit_process_group\("
)


_OF_TORCH = rf"torch\.(?:(?:{_DEVICES})\.[\w.]+|(?:amp\.)?autocast)"
_OWNER = rf"torch(?:\.(?:amp|(?:{_DEVICES})(?:\.\w+)*))?"
_REPLACES = re.compile(
    rf"\b(?:patch|setattr)\(\s*[\"'](?:[\w.]+\.)?({_OF_TORCH})[\"']"
    rf"|(?m:^)[ \t]*((?:\w+\.)*?{_OWNER})\.(\w+) *=(?!=)"
    rf"|\b(?:patch\.object|setattr)\(\s*((?:\w+\.)*?{_OWNER}),\s*[\"'](\w+)[\"']"
)
"""A function of a vendor's module, or torch's autocast, that a test or a script replaces; perhaps as a module's."""

_LOOKED_UP = re.compile(
    rf"\{{(?=[^{{}}]*[\"']({_DEVICES})[\"'] *:)[^{{}}]*[\"']cpu[\"'] *:|(?m:^)[ \t]*case [\"']({_DEVICES})[\"']"
)
"""A dict with values for one vendor's device and for the CPU, and a `match` of the device's type."""


def copies(calls: Collection[str], text: str, names: str = REFERS) -> bool:
    """Return whether calls that pickle or copy objects may get an optimizer itself, perhaps in a dict of their file.

    Args:
        calls: text of the calls.
        text: text of the file.
        names: pattern of the optimizer's names.
    """
    whole = rf"(?<![\w.'\"])(?:{names})(?![\w.(=])"
    held = rf"['\"] *: *(?:{names}) *[,}}\n]"
    return any(re.search(whole, call) for call in calls) or re.search(held, text) is not None


def copies_optimizer(text: str) -> bool:
    """Return whether a file that pickles or copies objects does so with an optimizer that another one may give it."""
    text = _LITERAL.sub('""', text) if "optim" in text or "sched" in text else ""
    calls = _COPY.findall(text)
    return bool(calls) and copies(calls, text)


def scaler_loads(text: str) -> set[frozenset[str]]:
    """Return the words in the conditions above each line that loads the state of a scaler."""
    lines, found = [line for line in text.splitlines() if line.strip()], set()
    for number, line in enumerate(lines):
        if not _LOADS_SCALER.search(line):
            continue
        least, words = _depth(line), set(_NAME.findall(line.partition(":")[0])) if _TEST.match(line) else set[str]()
        for above in reversed(lines[:number]):
            if _depth(above) < least:
                least = _depth(above)
                words |= set(_NAME.findall(above)) if _TEST.match(above) else set()
        found.add(frozenset(words))
    return found


def kept_questions(text: str, name: str = "this program") -> str:
    """Return why questions for a device stay in a program with a file of this text, and a name; "" if there is none."""
    if library := _CPU_OR_CUDA.search(text) or _BY_MPI.search(text):
        return f"{library[1]} knows tensors of CUDA and of the CPU only: other devices need torch.distributed"
    if BY_PLACE.search(text):
        return "this program reads a number from a device's name by its place behind 'cuda:': split it at the colon"
    if _LOOKED_UP.search(text):
        return "a dict or a `match` of this program has a value for CUDA and none for other devices: give it one"
    if _GROUPS.search(text):
        return "the process group is chosen for CUDA, another accelerator or the CPU: choose one for each device there"
    engine = engine_in(text)
    if engine is not None and ("lightning" in engine[0] or engine[0] == "composer"):
        return f"{engine[0]} trains {name} and chooses its devices, CUDA's and not those of every vendor"
    return ""


def flags_that_hide(text: str) -> set[str]:
    """Return the attributes under which a file hides devices, as `if args.use_gpu:` above such a line."""
    return {name for test in _HIDING.findall(text) for name in _MEMBER.findall(test)}


def flags_of_loads(text: str) -> set[str]:
    """Return the flags by which a file loads to the CPU, or to where the state was saved, which may be CUDA's."""
    tests = (one or other for one, other in _LOADS.findall(text))
    return {name for test in tests for _, name in _FLAG.findall(test)} - {"not", "and", "or"}


def flags_of_types(text: str) -> set[str]:
    """Return the flags by which a file names a type of tensor of one device, or `torch.cuda`: it keeps that line."""
    names = (one or other for one, _, other in _TYPES.findall(text))
    return {name.split(".")[-1] for name in names if not name.endswith(".is_cuda")}  # a tensor's, and no flag


def flags_of_devices(text: str) -> set[str]:
    """Return the flags by which a file chooses a device without a question for it."""
    tests = _tests(text, _ASSIGNED) + _CHOSEN_BY.findall(text)
    found = {name for test in tests if "available" not in test for _, name in _FLAG.findall(test)}
    return {name for name in found if _ABOUT.search(name)} - {*DEVICES, *_ANSWER.findall(text)}


def flags_off(text: str) -> set[str]:
    """Return the flags that a file turns off, or that are off unless its command line turns them on."""
    return {name.replace("-", "_") for names in _OFF.findall(text) for name in names if name}


def asks_where(text: str) -> bool:
    """Return whether a file asks for a device, and puts something on it."""
    return any("cuda.is_available(" in test for test in _tests(text, _VENDOR) + _CHOSEN_BY.findall(text))


def _tests(text: str, wanted: re.Pattern[str]) -> list[str]:
    """Return the conditions of a file above lines that a pattern matches."""
    return [test for test, body in _blocks(text) if wanted.search(body)]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the conditions of a file with what they guard."""
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if (test := _TEST.match(line)) is not None:
            depth = _depth(line)
            after = itertools.takewhile(lambda each: _depth(each) > depth, lines[number + 1 :])  # noqa: B023  # used at once
            yield test[1], "\n".join((test[2], *after))


def flags_of_moves(text: str, moved: Collection[str] | None) -> set[str]:
    """Return the attributes and parameters in conditions above a vendor's lines that the file does not set itself.

    Args:
        moved: names of objects; then only moves of these count. None: all of a vendor's lines do.
    """
    wanted = _VENDOR if moved is None else re.compile(rf"\b({'|'.join(moved)})\.({_DEVICES})\(")
    plain = (line for line in text.splitlines() if not _TEST.match(line) and wanted.search(line))
    tests = _tests(text, wanted) + [test for line in plain for test in _CHOICE.findall(line)]
    found = {(member, name) for test in tests for member, name in _FLAG.findall(test)}
    own = {name for member, name in found if not member} & set(_SET.findall(text))
    return {name for _, name in found} - own - set(_ASKED.findall(text))


def devices_of(text: str) -> Iterator[str]:
    """Yield whether a file reads, sets or declares an option for a device in settings, such as `args.device`."""
    return (word for word, pattern in zip(OF_DEVICE, _OF_DEVICE, strict=True) if pattern.search(text))


def uses_in(text: str) -> Iterator[str]:
    """Yield the kinds of objects that a file uses in a way that only the original allows: the words of `_USES`."""
    for kind, pattern in _USES.items():
        if pattern.search(text) or (kind == "apex" and _goes_on_without_apex(text)):
            yield kind


def _goes_on_without_apex(text: str) -> bool:
    """Return whether an import of apex may fail, and the file then does something else than to stop."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not _APEX.match(line):
            continue
        depth = _depth(line)
        after = ((at, each) for at, each in enumerate(lines[number + 1 :], number + 1) if each.strip())
        at, handler = next(((at, each) for at, each in after if _depth(each) < depth), (0, ""))
        if handler.lstrip().startswith("except"):
            rest = (each for each in lines[at + 1 :] if each.strip())
            least = _depth(handler)
            body = list(itertools.takewhile(lambda each: _depth(each) > least, rest))  # noqa: B023  # used at once
            if not STOPS.search("\n".join([handler, *body])):
                return True
    return False


def replaced_in(text: str) -> Iterator[str]:
    """Yield the functions of torch that a test replaces, as `mock.patch("torch.cuda.synchronize")` does."""
    for name, owner, assigned, module, attribute in _REPLACES.findall(text):
        found = name or re.sub(r".*?\b(?=torch\b)", "", f"{owner or module}.{assigned or attribute}", count=1)
        if re.fullmatch(_OF_TORCH, found):
            yield found.replace("torch.npu", "torch.cuda")


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def drives_apex(text: str, own: Collection[str]) -> bool:
    """Return whether another package drives apex in a file, such as timm's `ApexScaler`; `own` modules do not."""
    for module, names in _FROM.findall(text):
        first = module.split(".")[0]
        if first and first not in own and "apex" in names.lower():
            return True
    return _APEX.search(text) is not None and any(_DRIVERS.match(module) for module, _ in _FROM.findall(text))
