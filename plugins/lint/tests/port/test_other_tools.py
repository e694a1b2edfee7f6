"""What a port leaves to a vendor's other tools: probes for its packages, and its extensions."""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known, read_project
from port_sources import imported, written


@pytest.mark.parametrize("module", ["torch_npu", "apex"])
@pytest.mark.parametrize(
    ("body", "handler", "is_probe"),
    [
        ("    return True", "    return False", True),
        ("    found = True", "    found = False", True),
        ("", "    found = None", True),
        ("", "    pass", False),
        ("    found = True", "    raise SystemExit('install it')", False),
    ],
)
def test_an_import_by_which_a_script_asks_for_a_package_stays(module, body, handler, is_probe):
    source = (
        f"import torch\n\n\ndef ask(x):\n    try:\n        import {module}\n    {body}\n"
        f"    except ImportError:\n    {handler}\n    return x.cuda()\n"
    ).replace("\n    \n", "\n")
    outcome = port_source(source, Level.ROLES)
    assert (f"        import {module}\n" in outcome.source) is is_probe
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


@pytest.mark.parametrize(
    "line",
    [
        "from ._C import nms as nms_cuda",
        "from pkg._ext import nms_cuda",
        "import nms_cuda",
        "import ops_cuda as nms_cuda",
        "from ._ext import nms as nms_cuda",
    ],
)
@pytest.mark.parametrize("test", ["torch.cuda.is_available()", "x.is_cuda", "found"])
def test_a_condition_on_an_extension_of_one_vendor_stays(line, test):
    source = (
        f"import torch\n{line}\n\n\ndef f(x):\n    found = torch.cuda.is_available()\n"
        f"    if {test}:\n        return nms_cuda.run(x.cuda())\n    return x\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert f"    if {test}:\n" in ported
    assert test != "found" or "found = torch.cuda.is_available()" in ported
    own = source.replace(line, "from tools import nms_cuda")
    assert "is_cuda" not in port_source(own, Level.ROLES).source.replace("nms_cuda", "")
    assert "is_available()" not in port_source(own, Level.ROLES).source


@pytest.mark.parametrize(
    ("run", "kept"), [("src.gpu.run", True), ("nms_cuda.run", True), ("faiss.index_cpu_to_gpu", True), ("run", False)]
)
@pytest.mark.parametrize("test", ["not x.is_cuda", "not torch.cuda.is_available()"])
def test_a_condition_stays_whose_other_branch_has_an_extension(test, run, kept):
    source = (
        "import faiss\nimport nms_cuda\nimport torch\nfrom lib import run, src\n\n\ndef f(x, out):\n"
        f"    if {test}:\n        src.cpu.run(x, out)\n    else:\n        {run}(x, out.cuda())\n"
    )
    assert (f"if {test}:" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("name", "kept"), [("nms_gpu", True), ("roi_cuda", True), ("gpus", False)])
def test_a_question_stays_below_which_a_module_for_one_vendor_is_imported(name, kept):
    question = "if torch.cuda.is_available():"
    source = f"import torch\n\n{question}\n    from nms.{name} import run\n    x = torch.ones(2).cuda()\n"
    assert (f"{question}\n    from" in port_source(source, Level.ROLES).source) is kept


def test_a_module_of_the_project_is_no_extension():
    source = "import torch\nimport ops_cuda\n\n\ndef f(x):\n    if x.is_cuda:\n        return ops_cuda.run(x.cuda())\n"
    known = Known(modules=frozenset({"ops_cuda", "_ext"}))
    assert 'if x.device.type != "cpu":' in port_source(source, Level.ROLES, known).source
    made = source.replace("import ops_cuda", "from ._ext import reorg as ops_cuda")  # torch.utils.ffi has made it
    assert "if x.is_cuda:" in port_source(made, Level.ROLES, known).source


@pytest.mark.parametrize("value", ["['CUDAExecutionProvider']", "'gpu' if found else 'cpu'"])
def test_a_flag_that_chooses_among_other_packages_devices_stays(value):
    body = f"    if found:\n        kind = {value}\n" if value.startswith("[") else f"    kind = {value}\n"
    source = f"import torch\n\n\ndef f(x):\n    found = torch.cuda.is_available()\n{body}    return x.cuda(), kind\n"
    assert "found = torch.cuda.is_available()" in port_source(source, Level.ROLES).source
    inline = "import torch\n\n\ndef f():\n    return 'gpu' if torch.cuda.is_available() else 'cpu'\n"
    assert port_source(inline, Level.ROLES).source.endswith(inline.split("\n", 4)[4])


@pytest.mark.parametrize(("loader", "kept"), [("DataListLoader", True), ("FastLoader", False)])
def test_a_loader_for_another_packages_replicas_stays_cudas(loader, kept):
    question = f"{loader} if torch.cuda.is_available() else DataLoader"
    source = f"import torch\n\n\ndef load(data, x):\n    kind = {question}\n    return kind(data), x.cuda()\n"
    assert (question in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize("skip", ["@unittest.skipIf(not CUDA, 'no CUDA')", "@pytest.mark.skipif(not CUDA, reason='')"])
def test_a_question_stays_by_which_tests_are_skipped_that_are_left(skip):
    source = f"import torch\n\nCUDA = torch.cuda.is_available()\n\n\n{skip}\ndef test(x):\n    check(x, 'cuda')\n"
    assert "CUDA = torch.cuda.is_available()" in port_source(source, Level.ROLES).source
    moved = source.replace("check(x, 'cuda')", "x.cuda()")
    assert "is_available()" not in port_source(moved, Level.ROLES).source


@pytest.mark.parametrize("test", ["kind == 'cuda'", "kind == 'cuda' and x"])
def test_a_question_under_a_condition_that_is_left_stays(test):
    source = (
        "import torch\n\n\ndef f(x, kind, other='mps'):\n"
        f"    if {test}:\n        assert torch.cuda.is_available(), 'no CUDA'\n    return x.cuda()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "assert torch.cuda.is_available()" in ported
    assert f"if {test}:" in ported


FLAG = """try:
    import torch
    found = True
except ImportError:
    found = False

there = torch.cuda.is_available() if found else "N/A"
x = torch.ones(1).to("cuda") if found else None
"""
LATE = """def report():
    try:
        import torch
    except Exception as error:
        return str(error)
    return torch.ones(1).to("cuda") if torch.cuda.is_available() else 0


if __name__ == "__main__":
    print(report())
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("source", [FLAG, LATE])
def test_a_file_that_goes_on_without_torch_still_does(source, level):
    outcome = port_source(source, level)
    assert any("is missing" in note.text for note in outcome.left)
    with mock.patch.dict(sys.modules, {"torch": None, "accelcore": None}):
        exec(compile(outcome.source, "ported", "exec"), {"__name__": "__main__"})


def test_torch_is_not_imported_at_the_top_for_a_function_that_imports_it_itself():
    source = "def count():\n    import torch\n    return torch.cuda.device_count()\n"
    ported = port_source(source, Level.ROLES).source
    assert "cuda" not in ported
    assert ported.startswith("def count():\n    import torch\n    return torch.get_device_module(torch.accel")
    other = source.replace("import torch", "import torch as th").replace("torch.c", "th.c")
    assert port_source(other, Level.ROLES).source == (
        ported.replace("torch.", "th.").replace("import torch", "import torch as th")
    )


SCRIPT = "import torch\nfrom nets import Net\n\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"


@pytest.mark.parametrize("test", ["device == torch.device('cuda')", 'str(device) == "cuda"'])
def test_a_device_that_another_file_compares_has_no_index(tmp_path, test):
    train = f"{SCRIPT}net = Net(device)\nnet.step()\n"
    nets = f"class Net:\n    def __init__(self, device):\n        self.many = {test}\n"
    paths = written(tmp_path / "project", {"train.py": train, "nets.py": f"import torch\n\n\n{nets}"})
    ported = port_source(train, Level.ROLES, read_project(paths).known(paths[0])).source
    assert "\ndevice = torch.device(accel.device.type)\n" in ported
    assert "\ndevice = accel.device\n" in port_source(train, Level.ROLES).source


@pytest.mark.parametrize(("name", "is_module"), [("test_nets.py", True), ("nets.py", False)])
def test_a_file_of_tests_chooses_no_device_when_it_is_imported(tmp_path, name, is_module):
    source = (
        "import os\nimport pytest\nimport torch\n\nif 'BACKEND' in os.environ:\n    torch.manual_seed(0)\n\n\n"
        "@pytest.mark.skipif(not torch.cuda.is_available(), reason='')\n"
        "def test_move():\n    check(torch.ones(2).cuda())\n\n\nprint(test_move)\n"
    )
    paths = written(tmp_path / "project", {name: source})
    ported = port_source(source, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("accelcore" not in ported) is is_module
    assert ".cuda(" not in ported


FORMS = [
    "torch.device(f'cuda:{number}')",
    "torch.device('cuda:' + str(number))",
    "torch.device('cuda:%s' % number)",
    "torch.device('cuda:{}'.format(number))",
    "torch.device(f'cuda:{table[\"a\"]}')",
    "torch.device('cuda', number)",
    "torch.device('cuda', index=number)",
    "torch.device(f'cuda:{number}' if torch.cuda.is_available() else 'cpu')",
]


@pytest.mark.parametrize("made", FORMS)
def test_a_module_keeps_an_index_as_it_is_given(made):
    source = f"import torch\n\n\ndef place(number, table):\n    return {made}\n"
    outcome = port_source(source, Level.ROLES, Known(imported=True))
    assert (outcome.after, outcome.left) == (0, [])
    asked = "torch.accelerator.current_accelerator(check_available=True)"
    names: dict[str, Any] = {}
    exec(outcome.source.replace(asked, 'torch.device("meta")'), names)
    assert names["place"](3, {"a": 3}) == torch.device("meta", 3)


SCALED = "import torch\n\nscaler = torch.cuda.amp.GradScaler()\nmodel = torch.nn.Linear(2, 2).cuda()\n{}\n"


@pytest.mark.parametrize(
    ("use", "made"),
    [
        ("before = scaler.get_scale(), scaler.is_enabled()", "accel.scaler.create()"),
        ("scaler.set_growth_interval(9)", "torch.amp.GradScaler(accel.device.type)"),
        ("print(isinstance(scaler, torch.cuda.amp.GradScaler))", "torch.amp.GradScaler(accel.device.type)"),
    ],
)
def test_a_scaler_is_ours_if_it_has_what_the_script_asks(use, made):
    ported = port_source(SCALED.format(use), Level.ROLES).source
    assert f"scaler = {made}\n" in ported
    assert "cuda" not in ported  # an instance of torch's class is none of its subclass torch.cuda.amp.GradScaler


@pytest.mark.parametrize(
    ("flag", "load", "torchs"),
    [
        ("args.amp", "if args.resume:\n    scaler.load_state_dict(state)", True),
        ("args.amp", "if args.resume and args.amp:\n    print(1)\n    scaler.load_state_dict(state)", False),
        ("args.amp", "if scaler.is_enabled():\n    scaler.load_state_dict(state)", False),
        ("precision == 'fp16'", "if precision == 'fp16': scaler.load_state_dict(state)", False),
        ("False", "scaler.load_state_dict(state)", True),
        ("True", "scaler.load_state_dict(state)", False),
    ],
)
def test_a_scaler_that_may_be_off_and_loads_a_state_is_torchs(tmp_path, flag, load, torchs):
    source = f"import torch\n\nx = torch.ones(2).cuda()\nscaler = torch.cuda.amp.GradScaler(enabled={flag})\n"
    own = port_source(source + load, Level.ROLES).source
    assert (f"torch.amp.GradScaler(accel.device.type, enabled={flag})" in own) is torchs
    paths = written(tmp_path, {"train.py": source, "tools.py": load})
    assert port_source(source, Level.ROLES, read_project(paths).known(paths[0])).source in own


@pytest.mark.parametrize("value", ["{} if gpus > 0 else 'cpu'", "{} if torch.cuda.is_available() else 'cpu'", "{}"])
def test_a_device_in_a_dict_stays_where_a_cluster_may_run_the_script(value):
    value = value.format("'cuda'")
    source = f"import torch\nfrom {{}} import tune\n\n\ndef run(gpus):\n    tune({{{{'n': 1, 'device': {value}}}}})\n"
    assert f"'device': {value}}}" in port_source(source.format("ray"), Level.ROLES).source
    assert "'cuda'" not in port_source(source.format("other"), Level.ROLES).source


def test_the_state_of_a_devices_generator_is_read_where_there_is_a_device():
    source = (
        "import torch\n\nstate = torch.cuda.get_rng_state() if torch.cuda.is_available() else None\n"
        "if state is not None:\n    torch.cuda.set_rng_state(state)\n"
    )
    assert port_source(source, Level.TORCH).after == port_source(source, Level.ROLES).after == 0
    assert imported(port_source("import torch\nstate = torch.cuda.get_rng_state()\n", Level.TORCH).source).state is None


def test_a_function_that_imports_torch_late_needs_no_import_at_the_top():
    source = (
        "import click\n\n\n@click.command()\ndef run(model):\n    import torch\n\n"
        "    if torch.cuda.is_available():\n        model.cuda()\n\n\nif __name__ == '__main__':\n    run()\n"
    )
    ported = port_source(source, Level.ROLES, Known(steered=True)).source  # by a file that chooses the device
    assert ported.count("import torch\n") == 1
    assert "current_device = torch.accelerator" in ported


@pytest.mark.parametrize(("inner", "count"), [("import torch\n    ", 1), ("if x:\n        import torch\n        ", 2)])
def test_a_main_function_that_imports_torch_itself_needs_no_import_at_the_top(inner, count):
    source = f"def main(x):\n    {inner}print(torch.ones(2).cuda())\n\n\nif __name__ == '__main__':\n    main(argv)\n"
    ported = port_source(source, Level.TORCH).source
    assert ported.count("import torch\n") == count
    assert "cuda" not in ported


@pytest.mark.parametrize(
    ("call", "known", "kept"),
    [
        ("faiss.Kmeans(8, gpu={})", Known(), True),
        ("faiss.Kmeans(8, verbose={})", Known(), False),
        ("faiss.Kmeans(8, gpu={})", Known(modules=frozenset({"faiss"})), False),
        ("lightning.Trainer(precision=16 if {} else 32)", Known(), True),
    ],
)
@pytest.mark.parametrize("made", ["found = {}\n    cluster = {}", ""])
def test_another_package_computes_on_the_gpu_only_if_it_did_so_before(call, known, kept, made):
    asked = "torch.cuda.is_available()"
    body = made.format(asked, call.format("found")) if made else f"cluster = {call.format(asked)}"
    source = f"import {call.split('.')[0]}\nimport torch\n\n\ndef group(x):\n    {body}\n    return cluster(x.cuda())\n"
    ported = port_source(source, Level.ROLES, known).source
    assert (asked in ported) is kept
    assert "x.cuda()" not in ported


@pytest.mark.parametrize(
    ("body", "other", "kept"),
    [
        ("return 'GPU'", "elif torch.mps.is_available():\n        return 'MPS'\n    ", True),
        ("return 'GPU'", "", False),
        ("return torch.device('cuda')", "elif torch.mps.is_available():\n        return 'MPS'\n    ", False),
        ("return Device.CUDA", "", True),
        ("return config.CUDA", "", False),
    ],
)
def test_a_branch_for_one_vendor_does_not_take_another_accelerator(body, other, kept):
    source = (
        "import torch\n\n\ndef chosen(config):\n    if torch.cuda.is_available():\n"
        f"        {body}\n    {other}return torch.ones(2).cuda()\n"
    )
    assert ("torch.cuda.is_available()" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize("skip", ["pytest.skip('no CUDA')", "self.skipTest('')", "raise unittest.SkipTest('')"])
@pytest.mark.parametrize(("asserted", "kept"), [("x.is_cuda", True), ("x.sum() == 2", False)])
def test_a_test_that_skips_itself_still_does_so_if_a_line_of_it_is_left(skip, asserted, kept):
    source = (
        "import pytest\nimport torch\nimport unittest\n\n\ndef test_move(self):\n"
        f"    if not torch.cuda.is_available():\n        {skip}\n    x = torch.ones(2).cuda()\n    assert {asserted}\n"
    )
    ported = port_source(source, Level.ROLES, Known(imported=True)).source
    assert ("not torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("assert torch.ones(2).cuda().is_cuda", True),
        ("assert logsumexp(torch.ones(2).cuda())", True),
        ("assert torch.ones(2).cuda().sum() == 2", False),
    ],
)
def test_a_file_of_tests_is_still_skipped_elsewhere_if_a_line_of_it_is_left(line, kept):
    brought = "from extension.cuda import logsumexp\n" if "logsumexp" in line else ""
    skip = "if not torch.cuda.is_available():\n    pytest.skip('no CUDA', allow_module_level=True)\n"
    source = f"import pytest\nimport torch\n\n{skip}{brought}\n\ndef test_move():\n    {line}\n"
    ported = port_source(source, Level.ROLES, Known(imported=True)).source
    assert ("not torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize("kind", ["", ", device_type='cuda'"])
@pytest.mark.parametrize("devices", ["[torch.cuda.current_device()]", "range(torch.cuda.device_count())"])
def test_the_devices_of_a_forked_generator_are_cudas_unless_it_gets_their_type(devices, kind):
    source = f"import torch\n\n\ndef init(net):\n    with torch.random.fork_rng({devices}{kind}):\n        net.cuda()\n"
    outcome = port_source(source, Level.ROLES, Known(imported=True))
    assert (f"fork_rng({devices})" in outcome.source) is (not kind)
    assert [note.line for note in outcome.left] == ([] if kind else [5])
    assert "net.to(" in outcome.source


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("os.environ['RUN'] = 'cuda'", "an environment variable: write the device's type"),
        ("from apex.optimizers import FusedLAMB\n\nFusedLAMB(x)", "apex: accelcore has no apex.optimizers.FusedLAMB"),
        ("from apex import amp\n\namp.frobnicate()", "apex: accelcore has no apex.amp.frobnicate"),
        ("from apex import amp\n\namp.init()", "apex: a file of the project uses its private state"),
        ("from torch.cuda.amp import autocast, GradScaler\n\nf(autocast, GradScaler())", "torch.cuda.amp: one"),
        ("torch.manual_seed(1); torch.cuda.manual_seed(2)", "seeds of one vendor's devices"),
        ("isinstance(x, torch.cuda.FloatTensor)", "a question about one"),
        ("f(torch.cuda.FloatTensor)", "a type of tensor of one"),
        ("torch.cuda.set_device(number := rank())", "arguments of set_device that are not known"),
    ],
)
def test_what_is_left_has_its_own_reason(line, reason):
    left = port_source(f"import torch\n{line}\n", Level.ROLES).left
    assert left[0].text.startswith(reason)
    assert left[0].line == 2


@pytest.mark.parametrize(
    "top",
    [
        "try:\n    import torch\n    FOUND = True\nexcept ImportError:\n    FOUND = False\n",
        "import torch\nFOUND = True\n",
    ],
)
def test_a_file_that_goes_on_without_torch_may_import_more_of_it_in_a_function(top):
    source = (
        f"{top}\n\ndef name():\n    if FOUND and torch.cuda.is_available():\n"
        "        return torch.cuda.get_device_name(None)\n"
        "    return None\n\n\ndef more():\n    if FOUND:\n        import torch.backends.xnnpack\n\n"
        "        return torch.backends.xnnpack.enabled\n    return None\n\n\nprint(name(), more())\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ("accelcore.select()" in ported) is top.startswith("import")
    if top.startswith("try"):
        hidden = dict.fromkeys(("torch", "torch.backends", "torch.backends.xnnpack"))
        assert imported(ported, **hidden).name() is None


CHECKPOINT = """import torch


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run, ctx.state = run, torch.cuda.get_rng_state()
        {keeps}
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda.set_rng_state(ctx.state)
        {restores}
        with torch.enable_grad():
            (x,) = (each.detach().requires_grad_() for each in ctx.saved_tensors)
            ctx.run(x).backward(grad)
        return None, x.grad
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("keeps", "restores"),
    [("pass", "pass"), ("ctx.here = torch.get_rng_state()", "torch.set_rng_state(ctx.here)")],
)
def test_a_function_that_draws_the_same_again_does_so_on_the_cpu_or_stays(level, keeps, restores):
    outcome = port_source(CHECKPOINT.format(keeps=keeps, restores=restores), level)
    if keeps == "pass":
        assert outcome.source.count("torch.cuda.") == len(outcome.left) == 2
        return
    assert not outcome.left
    torch.manual_seed(0)
    x, seen = torch.ones(100, requires_grad=True), []

    def run(y):
        seen.append(torch.nn.functional.dropout(y))
        return seen[-1]

    imported(outcome.source).Checkpoint.apply(run, x).sum().backward()
    assert torch.equal(seen[0], seen[1])
