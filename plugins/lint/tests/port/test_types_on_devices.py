"""`x.type(torch.cuda.FloatTensor)` leaves a tensor on the one of several devices where it is; a move does not."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
TYPE = "mask = x.gt(0).type(torch.cuda.FloatTensor)"
LOSSES = "import torch\n\n\ndef masked(x):\n    return x * x.gt(0).type(torch.cuda.FloatTensor)\n"


@LEVELS
@pytest.mark.parametrize(
    ("lines", "stays"),
    [
        ("x = x.cuda()", False),
        ("x = x.to('cuda:0')", False),
        ("x = x.to(f'cuda:{args.gpu}')", True),
        ("x = x.to('cuda:' + str(gpu))", True),
        ("x = x.to('cuda:%d' % gpu)", True),
        ("x = x.to(torch.device('cuda', args.gpu))", True),
        ("x = x.cuda(args.gpu)", True),
        ("torch.cuda.set_device(args.gpu)\nx = x.cuda(args.gpu)", False),
        ("parser.add_argument('--device', default='cuda:0')\nx = x.to(args.device)", True),
        ("parser.add_argument('--device', default='cpu')\nx = x.cuda()", False),
    ],
)
def test_a_type_stays_in_a_script_that_may_use_another_device_than_the_current_one(level, lines, stays):
    outcome = port_source(f"import torch\n{lines}\n{TYPE}\n", level)
    assert (TYPE in outcome.source) is stays
    assert bool(outcome.left) is stays


@LEVELS
@pytest.mark.parametrize(
    ("script", "stays"),
    [
        ("x = torch.ones(2).cuda()", False),
        ("x = torch.ones(2).to(f'cuda:{args.gpu}')", True),
        ("torch.cuda.set_device(args.gpu)\nx = torch.ones(2).to(f'cuda:{args.gpu}')", False),
    ],
)
def test_a_type_stays_in_a_module_of_such_a_program(tmp_path, level, script, stays):
    paths = written(tmp_path, {"losses.py": LOSSES, "train.py": f"import torch\nimport losses\n\n{script}\n"})
    outcome = port_source(LOSSES, level, read_project(paths).known(paths[0]))
    assert ("type(torch.cuda.FloatTensor)" in outcome.source) is stays
    assert bool(outcome.left) is stays


@pytest.mark.parametrize(
    ("given", "is_left"), [("2, n", False), ("len(n), device=x.device", True), ("[n], device=x.device", True)]
)
def test_a_type_that_gets_a_device_stays(given, is_left):
    line = f"return torch.cuda.FloatTensor({given})"
    outcome = port_source(f"import torch\n\n\ndef made(x, n):\n    {line}\n", Level.ROLES)
    assert (line in outcome.source) is (len(outcome.left) == 1) is is_left
    compile(outcome.source, "module", "exec")
