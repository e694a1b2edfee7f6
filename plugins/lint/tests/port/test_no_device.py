"""Ports on the CPU of lines that did not run there: no number of devices is 0 in them, and no device is a number."""

import types

import pytest
import torch
from accelcore_lint.port import Level, port_source
from port_sources import imported

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES], ids=lambda level: level.value)
COUNT = "torch.cuda.device_count()"


@LEVELS
@pytest.mark.parametrize(
    ("lines", "value"),
    [
        (f"n = {COUNT}\nbatch_size = 8 * n", 8),
        (f"args.n_gpu = {COUNT}\nbatch_size = args.bs // args.n_gpu", 8),
        (f"n = {COUNT} if torch.cuda.is_available() else 0\nbatch_size = args.bs\nbatch_size //= n", 8),
        (f"n = {COUNT}\nbatch_size = args.bs * 2 * n", 16),
        (f"n = {COUNT}\nbatch_size = dict(batch_size=n * 3)['batch_size']", 3),
        (f"batch_size = dict(per_device_batch={COUNT} * 3)['per_device_batch']", 3),
        (f"n = {COUNT}\nlr = args.lr * n\nbatch_size = lr", 5),
        (f"def share(n):\n    return args.bs / n\nbatch_size = share({COUNT})", 8),
        (f"n = {COUNT}\nbatch_size = args.bs * n if n else 1", 1),
        (f"n = {COUNT}\nbatch_size = args.bs * max(n, 1)", 8),
        (f"n = {COUNT}\nbatch_size = 4 * n", 4),
        (f"n = {COUNT}\nworkers = 4 * n\nbatch_size = workers", 0),
        (f"n = {COUNT}\nbatch_size = 8 if n == 0 else 4", 8),
        (f"def share(n):\n    return 8 / n\nn = {COUNT}\nbatch_size = share(0.5)", 16),
        (f"n = {COUNT}\nbatch_size = [8 / n for n in (0.5,)][0]", 16),
        (f"n = {COUNT}\nfor n in (0.5,):\n    batch_size = 8 / n", 16),
        (f"n = {COUNT}\nn += 0.5\nbatch_size = 8 / n", 16),
        (f"n = {COUNT}\nbatch_size = f'{{8}} on %d' % n", "8 on 0"),
        (f"text = 'on %d'\nbatch_size = text % {COUNT}", "on 0"),
        (f"rank = int('2') if {COUNT} > 1 else 0\nbatch_size = rank * args.bs", 0),
    ],
)
def test_a_number_of_devices_is_at_least_one_where_zero_fails(level, lines, value):
    args = "import types\nimport torch\nargs = types.SimpleNamespace(bs=8, lr=5)\n"
    outcome = port_source(f"{args}{lines}\n", level)
    assert "torch.cuda" not in outcome.source
    made = {}
    exec(outcome.source, made)
    assert made["batch_size"] == value
    assert port_source(outcome.source, level).source == outcome.source


def test_a_number_that_a_function_passes_to_itself_is_left_as_it_is():
    source = f"import torch\n\n\ndef share(n):\n    return share(n) if n > 1 else 8 // n\n\n\nshare({COUNT})\n"
    assert "8 // n\n" in port_source(source, Level.ROLES).source


@LEVELS
@pytest.mark.parametrize("module", ["dist", "torch.distributed"])
@pytest.mark.parametrize(
    "given",
    ["device", "torch.device('cuda', rank)", "torch.device(f'cuda:{rank}')", "torch.cuda.current_device()", "rank"],
)
def test_a_process_group_on_the_cpu_has_no_device(level, module, given, tmp_path, monkeypatch):
    source = (
        "import torch\nimport torch.distributed as dist\n\n\ndef main(path, rank, join):\n"
        f"    device = torch.device('cuda', rank)\n    torch.cuda.set_device(rank)\n"
        f"    {module}.init_process_group('nccl', init_method=path, rank=0, world_size=1, device_id={given})\n"
    )
    ported = port_source(source, level)
    joined = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **options: joined.append(options))
    imported(ported.source).main("", 0, None)
    assert joined[0]["device_id"] is None
    assert port_source(ported.source, level).source == ported.source


@LEVELS
def test_a_device_of_a_process_group_stays_where_there_is_one(level):
    source = (
        "import torch\nimport torch.distributed as dist\nif torch.cuda.is_available():\n"
        "    device = torch.device('cuda', int(os.environ['LOCAL_RANK']))\n"
        "    dist.init_process_group('nccl', device_id=device)\n"
    )
    once = port_source(source, level).source
    assert " else None" not in once
    assert port_source(once, level).source == once


@pytest.mark.parametrize("given", ["device if args.cuda else None", "None"])
def test_a_device_of_a_process_group_that_may_be_none_stays(given):
    line = f"dist.init_process_group(backend, device_id={given})\n"
    source = f"import torch\nimport torch.distributed as dist\n{line}x = x.cuda()\n"
    assert line in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("FSDP(net, device_id={})", "torch.accelerator.current_device_index() if {} else None"),
        ("net.to_empty(device={})", "accel.device"),
    ],
)
def test_the_current_device_is_no_number_on_the_cpu(line, after):
    head = "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nnet = net.cuda()\n"
    ported = port_source(head + line.format("torch.cuda.current_device()") + "\n", Level.ROLES)
    assert line.format(after.format('accel.device.type != "cpu"')) in ported.source
    assert ported.left == []


@LEVELS
@pytest.mark.parametrize(
    "assigned",
    [
        "x = torch.ones(2).new_zeros(3, device={}).device.type",
        "device = {}\nx = torch.ones(2, device=device).device.type",
    ],
)
def test_a_name_of_the_current_device_has_no_number_on_the_cpu(level, assigned):
    name = "f'cuda:{torch.cuda.current_device()}'"
    made = {}
    exec(port_source(f"import torch\n{assigned.format(name)}\n", level).source, made)
    assert made["x"] == "cpu"


@pytest.mark.parametrize(
    "line", ["net = build(device={})", "def build(device={}):\n    return torch.ones(2, device=device)"]
)
def test_the_number_of_the_current_device_is_left_as_the_device_of_an_unknown_function(line):
    outcome = port_source(f"import torch\n{line.format('torch.cuda.current_device()')}\n", Level.ROLES)
    assert [note.line for note in outcome.left] == [2]
    assert "device=torch.cuda.current_device()" in outcome.source


SUMMARY = "from torchsummary import summary\n"


@LEVELS
@pytest.mark.parametrize(
    ("line", "is_left"),
    [
        (f"{SUMMARY}summary(net, (3, 2))", True),
        (f"{SUMMARY}summary(net, (3, 2), device='cuda' if args.gpu else 'cpu')", True),
        (f"{SUMMARY}summary(net, (3, 2), 4, device.type)", True),
        ("import torchsummary\ntorchsummary.summary(net, (3, 2), device='cuda')", True),
        ("from utils.torchsummary import summary\nsummary(net, (3, 2), device='cuda')", True),
        (f"{SUMMARY}summary(net, (3, 2), device='cpu')", False),
        (f"{SUMMARY}summary(net, (3, 2), -1, 'cpu')", False),
        ("from torchinfo import summary\nsummary(net, (3, 2), device='cuda')", False),
    ],
)
def test_torchsummary_knows_cuda_and_the_cpu_only(level, line, is_left):
    outcome = port_source(f"import torch\n\nnet = torch.nn.Linear(2, 2).cuda()\n{line}\n", level)
    assert [("torchsummary" in note.text) for note in outcome.left] == [True] * is_left
    assert (line.split("\n")[-1] in outcome.source) is (is_left or "'cpu')" in line)
    assert "torch.nn.Linear(2, 2).to(" in outcome.source
    assert port_source(outcome.source, level).source == outcome.source


@LEVELS
@pytest.mark.parametrize(
    "chosen",
    [
        "torch.device('cuda:' + str(args.gpu))",
        "torch.device('cuda', args.gpu)",
        "torch.device('cuda:1' if args.gpu > 0 else 'cpu')",
        "torch.device('cuda:1') if args.gpu > 0 else torch.device('cpu')",
        "f'cuda:{args.gpu}'",
    ],
)
@pytest.mark.parametrize("located", ["device", "str(device)"])
def test_torch_load_gets_the_cpu_without_a_number(level, chosen, located, tmp_path):
    torch.save(torch.ones(2), tmp_path / "state.pt")
    source = (
        "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--gpu', type=int, default=1)\nargs = parser.parse_args([])\n"
        f"device = {chosen}\nstate = torch.load({str(tmp_path / 'state.pt')!r}, map_location={located})\n"
    )
    made = {}
    exec(port_source(source, level).source, made)
    assert made["state"].device.type == "cpu"


@pytest.mark.parametrize("line", ["x.cuda(n)", "x.to(f'cuda:{n}')"])
def test_a_move_that_no_other_line_reads_keeps_its_number(line):
    source = (
        "import torch\n\n\ndef run(path, device, n):\n    assert n > 0\n"
        f"    x = torch.load(path, map_location=device)\n    return {line}\n"
    )
    assert "return x.to(torch.device(current_device.type, n))\n" in port_source(source, Level.ROLES).source


CHECKS = """import importlib.util


def check():
    if importlib.util.find_spec("torch") is None:
        return False
    {}


{}
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "line",
    [
        "from torch import cuda\n    return cuda.is_available() and cuda.device_count() > 0",
        "import torch\n    return torch.cuda.is_available()",
        "import torch as t\n    return t.ones(1).cuda()",
    ],
)
def test_a_file_that_imports_torch_in_functions_only_also_runs_without(level, line):
    ported = port_source(CHECKS.format(line, "check()\nprint(check())"), level).source
    lines = ported.split("\ndef check")[0] + ported.split("\n\n\n")[-1]
    assert "import torch" not in lines
    assert "select()" not in lines


def test_a_program_that_imports_torch_in_its_function_chooses_the_device_there():
    source = (
        "def main():\n    import torch\n\n    model = torch.nn.Linear(2, 2).cuda()\n    model.train()\n\n\nmain()\n"
    )
    assert "import torch\n\n    accel = accelcore.select()\n" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize("default", ["", "=None"])
def test_figures_of_a_device_that_may_be_none_are_those_of_the_current_one(default, monkeypatch):
    source = f"import torch\ndef used(device{default}):\n    return torch.cuda.memory_allocated(device)\n"
    ported, made = port_source(source, Level.ROLES), {}
    assert ported.after == 0
    exec(ported.source, made)
    assert made["used"](None) == 0
    module = types.SimpleNamespace(memory_allocated=lambda device: [device])
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    device = torch.device("meta", 1)
    assert (made["used"](None), made["used"](device)) == ([None], [device])


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_of_another_kind_stays_a_groups_device(level):
    source = (
        "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\nnet = f().cuda()\n"
        "net = FSDP(net, device_id=torch.device('mps'))\n"
    )
    assert "device_id=torch.device('mps'))\n" in port_source(source, level).source
