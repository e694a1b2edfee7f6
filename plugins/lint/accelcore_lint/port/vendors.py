"""Words that tie a line to one vendor, and the count of such lines."""

from __future__ import annotations

import contextlib
import io
import itertools
import keyword
import re
import tokenize

DEVICES = ("cuda", "npu")
"""Names of devices that scripts are ported from."""

GROUPS = ("nccl", "hccl")
"""Process-group backends of those devices."""

MODULES = ("apex", "torch_npu")
"""Packages that only work on those devices."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Environment variables that hide those devices."""

OTHERS = ("numba", "cupy")
"""Packages that have functions for those devices beside others."""

FLAGS = ("is_cuda", "is_npu")
"""Attributes by which a tensor answers whether it is on such a device."""

SETTINGS = re.compile(
    r"(.*\.)?(self|cls|_*(args?|cfg|conf|configs?|opts?|options?|settings|(h|hyper)?params|hps|flags))", re.IGNORECASE
)
"""Names of options and settings, whose `device` and `is_cuda` are not a tensor's."""

_WORDS = {*DEVICES, *MODULES, "cudnn", "npu_fusion_attention"}
_ARGUMENTS = ("device_ids", "output_device")
_REPLICAS = re.compile(r"\bDataParallel(?: as (\w+))?")
"""A class of torch that takes the numbers of any accelerator's devices, and ignores them where there is none."""

_OTHER_REPLICAS = re.compile(
    r"(?m)^[ \t]*(?:from[ \t]+(?!torch(?:\.nn[\w.]*)?[ \t])[\w.]+[ \t]+import\b[^\n]*|class[ \t]+)\bDataParallel\b"
)

_TOOL_NAMES = {
    "pynvml|nvml[A-Z].*": "NVIDIA's library for its driver, which fails elsewhere: use it on its devices only",
    "(Standard)?Gpu(Index|Resources|Cloner|MultipleCloner).*|index_cpu_to_(gpu|all_gpus).*": (
        "an index of faiss on one vendor's devices: keep it on the CPU elsewhere"
    ),
}
_TOOL_STRINGS = {
    "(CUDA|Tensorrt|CANN)ExecutionProvider": (
        "a provider of one vendor: take one of onnxruntime.get_available_providers()"
    ),
    r".+\.cuh?": "a source in CUDA C++, for one vendor's compiler: other devices need another one",
    "(CUDA|ASCEND_RT)_VISIBLE_DEVICES": (
        "a variable that other devices do not read: set theirs where the script is started"
    ),
    rf"(?i:(?:[\w:]+,)*(?:(?:{'|'.join(DEVICES)}):)?(?:{'|'.join(GROUPS)})(?:,[\w:]+)*)": (
        "the process group of one vendor's devices: choose the backend by the device"
    ),
}
"""Names and strings of one vendor's tools, and what to do about a line that has one."""

_TOOL_NAME, _TOOL_STRING = (re.compile("|".join(known)) for known in (_TOOL_NAMES, _TOOL_STRINGS))
PRIVATE = re.compile(r"(?i)torch\._C\.(\w+\.)*\w*(cuda|cudnn)\w*|\btorch\.\w*cudnn_\w+")
"""Functions of torch for one vendor's devices only."""

_LIBRARIES = ("pynvml", "faiss")
_WORD = re.compile(r"(?<![\w'\"])\w+(?![\w'\"])")
_LITERAL = re.compile(r"(['\"])(.*?)\1")
_OPTION = re.compile(r"NpuFused\w+")
_TEXT = re.compile(rf"({'|'.join(DEVICES)})(:(\d+|%[dsi]|\{{.*\}}|\{{\}}|))?")
_TYPE = re.compile(rf"torch\.({'|'.join(DEVICES)})\.\w*Tensor")
_IMPORTS = re.compile(rb"(?m)^[ \t\f]*(from|import)\b[^\n#]*\b(torch|torch_npu|torchvision|apex)\b")
_MOVES = re.compile(rb"\.(cuda|npu)\(")
_NAMED = re.compile(
    rb"cuda|cudnn|accelcore|device_ids|(?<![a-zA-Z])npu|Npu|(?i:nccl|hccl)|apex"
    rb"|pynvml|faiss|ExecutionProvider|VISIBLE_DEVICES|\.cuh?['\"]"
)
_BUILDS = re.compile(
    r"(?m)^[ \t]*((?:from|import)[ \t]+(?:torch\.utils\.(?:cpp_extension|ffi)|setuptools|distutils\.core|skbuild)\b"
    r"|from[ \t]+torch\.utils[ \t]+import\b[^\n]*\bcpp_extension\b)"
)
STAR_IMPORT = re.compile(r"(?m)^from\b[^\n#]*\bimport[ \t]*\*")
"""An import that may bring the name `torch` from a module of the script's own."""

_OUR_APEX = re.compile(r"(?m)^\s*from accelcore import (.*, *)?apex\b")
_NAMESPACES = re.compile(r"(?m)^[ \t]*(\w+)(?:, *\w+)?[ \t]*=[ \t]*[\w.]+\.parse_(?:known_)?args\(")
_OWN_WORDS = (*DEVICES, "apex", "cudnn")
_OWN = "|".join(_OWN_WORDS)
"""Words by which scripts also call options of their own."""

_SET_FLAGS = re.compile(
    r"(?m)(?:\bdef[ \t]+is_(?:cuda|npu)\b|\bis_(?:cuda|npu)[ \t]*=(?!=)|^[ \t]*is_(?:cuda|npu)[ \t]*:)"
)
_FLAGS = re.compile(rf"(?m)^[ \t]*({_OWN})[ \t]*(?::[^=\n]+)?=(?!=)")
_IMPORTED = re.compile(rf"(?m)^[ \t]*(?:from|import)\b[^#\n]*\b({_OWN})\b[ \t]*(?:,|as\b|$|#)")
_MEMBERS = re.compile(rf"(?m)^[ \t]*self\.({_OWN})[ \t]*=(?!=)")
_GIVEN = re.compile(rf"[,=]\s*self\.({_OWN})\s*[,)]")
_TRUTHS = re.compile(rf"\b(?:if|elif|while|and|or|not)[ \t(]+((?:\w+\.)*\w+\.(?:{_OWN}))\b(?![ \t]*[.(])")
_SETTINGS = re.compile(
    r"(?i:\b((?:\w+\.)*(?:\w*_)?(?:args?|cfg|conf|configs?|opts?|options?|settings|h?params|hps|flags)))"
    rf"\.({_OWN})\b(?![ \t]*[.(])"
)
_SETS = re.compile(
    rf"(?i)\bdevices?[\"']?\]?(?: *= *|: *|[\"'][^\n]*\bdefault *= *)\[?[\"']({'|'.join(DEVICES)})(?::\d+)?[\"']"
    rf"|\.({'|'.join(DEVICES)})\(\)"
    rf"|backend[\"']?\]?(?: *= *|: *|[\"'][^\n]*\bdefault *= *)[\"']({'|'.join(GROUPS)})[\"']"
    rf"|ExecutionProvider[\"']|_VISIBLE_DEVICES[\"']|\.(?:{'|'.join(FLAGS)})\b"
)
_OTHER_FRAMEWORKS = re.compile(r"(?m)^[ \t]*(?:import|from)[ \t]+(tensorflow|keras|jax|flax|mxnet|paddle)\b")
_HEADS = re.compile(r"(?s)\bdef\s+\w+\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_PARAMETER = re.compile(rf"(?:^|,)\s*({_OWN})\s*(?:[,:=]|$)")
_STRING = re.compile(r"(?s)[a-zA-Z]*('''|\"\"\"|'|\")(.*)\1")


def device_text(text: str) -> bool:
    """Return whether the value of a string is the name of a device: `cuda`, `cuda:0`, `cuda:{rank}`."""
    return _TEXT.fullmatch(text) is not None


def type_text(text: str) -> bool:
    """Return whether the value of a string is the name of a type of one device: `torch.cuda.FloatTensor`."""
    return _TYPE.fullmatch(text) is not None


def may_concern(source: bytes, *, meets_torch: bool = False) -> bool:
    """Return whether a file imports what may have to be ported, and has a vendor's word, without parsing it.

    If files that it imports bring torch (`meets_torch`), a move such as `x.cuda()` concerns torch, too.
    """
    if _NAMED.search(source) is None:
        return False
    brings = b"torch." in source and STAR_IMPORT.search(source.decode("utf-8", "replace"))
    return imports_torch(source) or bool(brings) or (meets_torch and _MOVES.search(source) is not None)


def imports_torch(source: bytes) -> bool:
    """Return whether a file imports torch, or what is made for it, without parsing it."""
    return _IMPORTS.search(source) is not None


def builds_extensions(source: str) -> int:
    """Return the line of the import by which a file builds a package or an extension; 0 if there is none."""
    found = _BUILDS.search(source)
    return source.count("\n", 0, found.start(1)) + 1 if found else 0


def own_options(source: str) -> set[str]:
    """Return what a script itself calls as a device: attributes of argparse's namespace, and variables.

    What an option `--cuda` stores in `args.cuda`, or what the script sets there (`args.cuda = not args.no_cuda`), is a
    flag. So is a variable as in `cuda = torch.cuda.is_available()`, or a function's parameter `cuda`, unless the file
    imports something of that name, an attribute that the script sets, as in `self.cuda = use_cuda`, or hands on and
    never calls, as in `moved(x, self.cuda)`, one whose truth it asks, as in `if flags.cuda:`, and one of settings such
    as `args.cuda`, `train_args.cuda` or `self.opt.cuda`.
    """
    options = {f"{space}.{word}" for space in _NAMESPACES.findall(source) for word in _OWN.split("|")}
    given = {word for word in _GIVEN.findall(source) if f"self.{word}(" not in source}
    options |= {f"self.{word}" for word in given | set(_MEMBERS.findall(source))}
    asked = {name for name in _TRUTHS.findall(source) if not name.startswith("torch.")}
    asked |= {f"{owner}.{device}" for owner, device in _SETTINGS.findall(source)}
    options |= asked | {".".join(name.split(".")[-2:]) for name in asked}
    parameters = {name for head in _HEADS.findall(source) for name in _PARAMETER.findall(head)}
    return options | ((set(_FLAGS.findall(source)) | parameters) - set(_IMPORTED.findall(source)))


def vendor_lines(source: str) -> set[int]:
    """Return the numbers of the lines that work on one vendor's devices only.

    These are lines with the name of a device or of a vendor's package: `cuda`, `torch_npu`, `cudnn`, `NpuFusedSGD`,
    the argument `device_ids=` without a condition by which it is None elsewhere, or a string such as "cuda:0" or
    "nccl". torch's DataParallel takes `device_ids` on all devices. So are a vendor's tools: pynvml, an index of
    faiss, a provider of onnxruntime, a source "kernel.cu", and CUDA_VISIBLE_DEVICES, unless the file has the variables
    of both vendors. So is a tensor's `x.is_cuda`, unless the file sets a flag of that name. Names that only contain
    such a word, as `use_cuda`, comments and docstrings do not count, and neither do `accelcore.apex`, the script's own
    option `args.cuda`, a flag `cuda=True`, a key as in `config["cuda"]`, its own variable `device_ids`, and a call of
    its own function `cuda(x)`.
    """
    found: set[int] = set()
    own = own_options(source)
    statement_begins = True
    before = earlier = ""
    calls: list[str] = []
    in_accelcore = False
    replicas = set() if _OTHER_REPLICAS.search(source) else {"DataParallel", *_REPLICAS.findall(source)}
    words = _WORDS - {"apex"} if _OUR_APEX.search(source) else _WORDS
    sets_flags = _SET_FLAGS.search(source) is not None
    has_tools = any(each in source for each in _LIBRARIES)
    sets_all = all(each in source for each in VISIBLE)  # each vendor's variable, so that the devices are chosen on all
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, following in itertools.pairwise(tokens):
        kind, text, (line, _) = token.type, token.string, token.start
        if kind in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            statement_begins, in_accelcore = True, False
            continue
        if kind in (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING):
            continue
        if kind == tokenize.NAME:
            in_accelcore = in_accelcore or (text == "accelcore" and before in ("from", "import"))
            is_argument = bool(calls) and before != "." and following.string == "="
            if (f"{earlier}.{text}" if before == "." else text) in own and before not in ("from", "import"):
                continue
            if text in DEVICES and before != "." and following.string == "(":
                continue  # a function or a method of the project: no package has one of this name
            is_option = _OPTION.fullmatch(text) and not (words is not _WORDS and earlier == "optimizers")
            is_flag = is_argument and text in _OWN_WORDS
            is_devices = is_argument and text in _ARGUMENTS and " else None" not in token.line
            is_devices = is_devices and calls[-1] not in {*replicas, "def"}
            is_question = text in FLAGS and before == "." and following.string != "(" and not sets_flags
            is_question = is_question and not SETTINGS.fullmatch(earlier)
            is_word = text in words or (text in _WORDS and before in ("from", "import"))
            is_word = is_word or (has_tools and _TOOL_NAME.fullmatch(text) is not None)
            is_word = is_word or (before == "." and text in _private_names(token.line))
            if is_devices or is_question or ((is_word or is_option) and not (in_accelcore or is_flag)):
                found.add(line)
        elif kind == tokenize.STRING and not statement_begins:
            match = _STRING.fullmatch(text)
            value = match[2] if match else ""
            is_own = _is_own_word(earlier, before, following.string)
            is_tool = _TOOL_STRING.fullmatch(value) is not None and not (sets_all and value in VISIBLE)
            is_tool = is_tool and (earlier, before) != ("help", "=")
            if is_tool or (not is_own and (device_text(value) or type_text(value))):
                found.add(line)
        elif tokenize.tok_name[kind] == "FSTRING_MIDDLE" and text.rstrip(":") in DEVICES:
            found.add(line)
        elif kind == tokenize.OP:
            if text in "([{":
                calls.append("def" if earlier == "def" else before)
            elif text in ")]}" and calls:
                calls.pop()
        statement_begins, earlier, before = False, before, text
    return found


def lines_kept(source: str) -> int:
    """Return the number of lines for one vendor in a file that is not ported, also of another version of Python."""
    if not may_concern(source.encode("utf-8", "surrogatepass"), meets_torch=True):
        return 0
    for text in (source, "\n".join(map(str.lstrip, source.split("\n")))):  # an indentation may be wrong
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            return len(vendor_lines(text))
    return 0


def tool_reason(line: str) -> str:
    """Return what to do about a line with a name or a string of one vendor's tools; "" if it has none."""
    words = [(_TOOL_NAMES, word) for word in _WORD.findall(line)]
    words += [(_TOOL_STRINGS, text) for _, text in _LITERAL.findall(line)]
    return next((why for known, word in words for each, why in known.items() if re.fullmatch(each, word)), "")


def settings_lines(source: str) -> list[int]:
    """Return the lines of a file without torch that choose a vendor's device: `config.DEVICE = "cuda"`, `x.cuda()`.

    Also those that choose its process group or its tools, as `dist_params = dict(backend="nccl")`, that set or read
    `CUDA_VISIBLE_DEVICES`, and that ask for `x.is_cuda`. A file for another framework has process groups only.
    """
    if (other := _OTHER_FRAMEWORKS.search(source)) and other[1] == "paddle":
        return []  # it has process groups of these names, too
    found = {source.count("\n", 0, each.end()) + 1 for each in _SETS.finditer(source) if each[3] or not other}
    return sorted(found & vendor_lines(source)) if found else []


def first_lines(source: str) -> dict[int, int]:
    """Return the number of the line at which the statement, or its head, begins, for each line with a part of it."""
    first, found = 0, dict[int, int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        first = first or token.start[0]
        found |= dict.fromkeys(range(token.start[0], token.end[0] + 1), first)
        first = 0 if token.type == tokenize.NEWLINE else first
    return found


def _private_names(line: str) -> set[str]:
    """Return the last names of torch's functions for one vendor in a line, such as `torch._C._cudnn_convolution`."""
    return {each[0].rpartition(".")[2] for each in PRIVATE.finditer(line)}


def _is_own_word(earlier: str, before: str, after: str) -> bool:
    """Return whether a string between these words names the script's own: `config["cuda"]`, `dest="cuda"`."""
    is_key = before == "[" and after == "]" and earlier.isidentifier() and not keyword.iskeyword(earlier)
    return is_key or (earlier, before) == ("dest", "=")
