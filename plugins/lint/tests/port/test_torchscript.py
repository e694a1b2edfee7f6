"""What TorchScript compiles, or may compile, asks for no device: such lines stay."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])

MODULE = """import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(1).cuda()

    def forward(self, x):
        return self.shift(x) * torch.ones(2, device="cuda")

    def shift(self, x):
        return x.cuda()


def double(x):
    return 2 * x.cuda()


def triple(x):
    return double(x) + x.cuda()


def other(x):
    return x.cuda()


net = {}
"""


@LEVELS
@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("torch.jit.script(Net())", 2),
        ("torch.jit.script(triple)", 2),
        ("torch.jit.script(double)", 1),
        ("torch.jit.trace(Net(), torch.ones(2))", 0),
    ],
)
def test_what_torchscript_compiles_asks_for_no_device(level, line, left):
    notes = port_source(MODULE.format(line), level).left
    assert len(notes) == left
    assert all("jit" in note.text for note in notes)


COMPILED = """import torch


def window(n: int):
    return torch.ones(n).cuda()


class Filter(object):
    def __init__(self, n: int = 4):
        self.filter = window(n).cuda()


def f(x: torch.Tensor):
    return x * window(4)
"""


@LEVELS
@pytest.mark.parametrize(
    ("source", "left"),
    [
        (COMPILED, 0),
        (COMPILED.replace("def f", "@torch.jit.script\ndef f"), 1),
        (COMPILED.replace("class", "@torch.jit.script\nclass"), 2),
        (COMPILED + "\n\nFilter = torch.jit.script(Filter)\n", 2),
        (COMPILED.replace("def f", "@torch.jit.script_if_tracing\ndef f"), 1),
        ("from torch.jit import script\n" + COMPILED.replace("def f", "@script\ndef f"), 1),
        ("from torch.jit import script as fast\n" + COMPILED + "\nf = fast(f)\n", 1),
        ("from torch.jit import trace, script as fast\n" + COMPILED + "\nf = trace(f, x)\n", 0),
        (COMPILED.replace("def f", "fuse = torch.jit.script if old else torch.compile\n\n\n@fuse\ndef f"), 1),
        (COMPILED.replace("def f", "def fuse(g):\n    return torch.jit.script(g)\n\n\n@fuse\ndef f"), 1),
    ],
)
def test_what_a_compiled_function_or_class_calls_asks_for_no_device(level, source, left):
    notes = port_source(source, level).left
    assert len(notes) == left
    assert all("jit" in note.text for note in notes)


def test_what_another_file_compiles_or_calls_in_compiled_code_asks_for_no_device(tmp_path):
    (tmp_path / "parts.py").write_text(COMPILED)
    (tmp_path / "net.py").write_text(
        "import torch\nfrom parts import window\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        window(2)\n\n    def forward(self, x):\n        return x * window(2)\n"
    )
    for run, left in [
        ("fast = torch.jit.script(parts.f)", 1),
        ("fast = torch.jit.script(parts.Filter)", 2),
        ("import net\nfast = torch.jit.script(net.Net())", 1),
        ("import net\nfast = net.Net()", 0),
    ]:
        (tmp_path / "run.py").write_text(f"import torch\nimport parts\n{run}\n")
        project = read_project([tmp_path / "parts.py", tmp_path / "run.py", tmp_path / "net.py"])
        notes = port_source(COMPILED, Level.ROLES, project.known(tmp_path / "parts.py")).left
        assert (run, len(notes)) == (run, left)


def test_what_another_file_calls_torchscript_compiles_methods(tmp_path):
    fuser = "import torch\n\nfuse = torch.jit.script_method\nBase = torch.jit.ScriptModule\n"
    (tmp_path / "fuser.py").write_text(fuser)
    net = (
        "import torch\nfrom fuser import fuse, Base\n\n\nclass Net(Base):\n    @fuse\n    def forward(self, x):\n"
        "        return x.cuda()\n\n    def other(self, x):\n        return x.cuda()\n"
    )
    (tmp_path / "net.py").write_text(net)
    project = read_project([tmp_path / "fuser.py", tmp_path / "net.py"])
    (note,) = port_source(net, Level.ROLES, project.known(tmp_path / "net.py")).left
    assert "jit" in note.text


def test_a_module_stays_if_another_file_compiles_it(tmp_path):
    (tmp_path / "net.py").write_text(MODULE.format("None"))
    (tmp_path / "run.py").write_text("import torch\nfrom net import Net\n\nnet = torch.jit.script(Net())\n")
    project = read_project([tmp_path / "net.py", tmp_path / "run.py"])
    assert len(port_source(MODULE.format("None"), Level.ROLES, project.known(tmp_path / "net.py")).left) == 2


@pytest.mark.parametrize("line", ["# net = torch.jit.script(Net())", "print('torch.jit.script(Net())')"])
def test_a_comment_or_a_text_compiles_no_module(tmp_path, line):
    (tmp_path / "net.py").write_text(MODULE.format("None"))
    (tmp_path / "run.py").write_text(f"import torch\nfrom net import Net\n\n{line}\n")
    project = read_project([tmp_path / "net.py", tmp_path / "run.py"])
    assert port_source(MODULE.format("None"), Level.ROLES, project.known(tmp_path / "net.py")).left == []


@LEVELS
@pytest.mark.parametrize("base", ["Function", "torch.autograd.Function"])
def test_torchscript_does_not_compile_a_function_of_autograd(level, base):
    source = (
        f"import torch\nfrom torch.autograd import Function\n\n\nclass Loss({base}):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x.cuda()\n\n\nnet = torch.jit.script(make())\n"
    )
    assert port_source(source, level).left == []
    assert port_source(source.replace(f"({base})", "(torch.nn.Module)"), level).left
