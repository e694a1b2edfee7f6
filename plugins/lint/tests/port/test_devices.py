"""Which device a ported script uses: the number in a name, the current one, or the only one that it names."""

from __future__ import annotations

from unittest import mock

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from port_sources import left_by_rules

torch = pytest.importorskip("torch")


def _ported(source, level=Level.ROLES):
    outcome = port_source(source, level)
    assert port_source(outcome.source, level).source == outcome.source
    return outcome


def test_processes_that_choose_a_device_by_a_table_of_their_own_keep_that_choice():
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        "def work(rank, table):\n    number = table[rank]\n    loc = 'npu:{}'.format(number)\n"
        "    torch.npu.set_device(loc)\n    model = Net().npu()\n    torch.load(path, map_location=loc)\n\n\n"
        "mp.spawn(work, nprocs=2, args=({0: 4, 1: 5},))\n"
    )
    outcome = _ported(source)
    assert outcome.after == 0
    assert not outcome.left
    assert "torch.accelerator.set_device_index(loc)" in outcome.source
    assert 'f"{current_device.type}:{number}" if current_device.type != "cpu" else "cpu"' in outcome.source
    assert "Net().to(current_device)" in outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_that_is_made_current_by_its_name_keeps_its_number(level):
    source = (
        "import torch\nN = int(environ['N'])\ntorch.npu.set_device(f'npu:{N}')\nx = x.to(f'npu:{N}')\ny = y.npu()\n"
    )
    outcome = _ported(source, level)
    assert outcome.after == 0
    assert not outcome.left
    assert "torch.accelerator.set_device_index(N)" in outcome.source


def test_the_first_device_may_have_a_name_before_it_is_made_current():
    source = (
        "import torch\n\n\nclass Trainer:\n    def __init__(self):\n"
        '        self.device = "cuda:0" if torch.cuda.is_available() else "cpu"\n'
        "        torch.cuda.set_device(self.device)\n\n\nTrainer()\n"
    )
    outcome = _ported(source)
    assert "        self.device = str(accel.device)\n" in outcome.source
    assert not outcome.left
    assert "set_device" not in outcome.source


@pytest.mark.parametrize(
    "source",
    [
        "model.cuda(1)\nx = x.cuda()\n",  # the second goes to device 0
        "model.cuda(1)\nx = x.cuda(2)\n",
        "model.cuda(1)\nfor i in range(torch.cuda.device_count()):\n    x[i] = x[i].cuda(i)\n",
        "model = torch.nn.DataParallel(model, device_ids=[1, 2]).cuda(1)\n",
    ],
)
def test_a_script_with_several_devices_does_not(source):
    outcome = _ported(f"import torch\n{source}")
    assert "select" not in outcome.source
    assert ".to(torch.device(current_device.type, 1))" in outcome.source


def test_the_device_of_a_checkpoint_is_moved_as_before():
    source = "import torch\nwhere = {'cuda:0': 'cuda:%d' % local_rank}\ntorch.load(path, map_location=where)\n"
    assert _ported(source).left  # `where` may be for something else
    source = source.replace("where", "map_location")
    assert '{f"{accel.device.type}:0": str(accel.device)}' in _ported(source).source
    number = "import torch\nstate = torch.load(path, map_location=torch.cuda.current_device())\n"
    assert "map_location=accel.device)" in _ported(number).source  # torch.load takes no number


@pytest.mark.parametrize(
    ("value", "new"),
    [
        ("self.device = device", "x.to(self.device if self.device is not None else current_device)"),
        ("self.device = None", "x.to(self.device if self.device is not None else current_device)"),
    ],
)
def test_an_attribute_with_a_device_is_one_unless_it_may_be_none(value, new):
    source = (
        f"import torch\n\n\nclass Net:\n    def __init__(self, device):\n        {value}\n        x.cuda(self.device)\n"
    )
    assert new in _ported(source).source


def test_a_function_that_can_choose_no_device_waits_and_replicates_without_a_backend():
    source = (
        "import os\nimport torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        "def wait():\n    torch.cuda.synchronize()\n\n\n"
        "def wrap(model):\n    return DDP(model, device_ids=[LOCAL_RANK])\n\n\n"
        'def choose(name):\n    os.environ["CUDA_VISIBLE_DEVICES"] = name\n'
    )
    outcome = _ported(source)
    assert not left_by_rules(outcome)
    assert "if torch.accelerator.is_available():\n        torch.accelerator.synchronize()" in outcome.source
    assert "device_ids=[LOCAL_RANK] if torch.accelerator.is_available() else None" in outcome.source


def test_a_device_that_gets_a_name_before_it_is_made_current_keeps_its_number():
    source = (
        "import horovod.torch as hvd\nimport torch\nlocal_rank = hvd.local_rank()\n"
        'device = torch.device(f"cuda:{local_rank}")\ntorch.cuda.set_device(device)\nmodel.to(device)\n'
    )
    assert "device = torch.device(current_device.type, local_rank)\n" in _ported(source).source


def test_processes_that_a_library_starts_use_the_current_device():
    source = (
        "import torch\nfrom detectron2.engine import launch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        "def main(args):\n    train(DDP(make().cuda(), device_ids=[rank()]))\n\n\n"
        "launch(main, 8, num_machines=1, dist_url='auto', args=(args,))\n"
    )
    ported = _ported(source).source
    assert "accelcore" not in ported
    assert 'device_ids=[current_device] if current_device.type != "cpu" else None' in ported


_FALLS_BACK = """import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
if args.device == "cuda":
    count = torch.cuda.device_count()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
workers = count if device.type == "cuda" else 1
kind = "fast" if device.type == "cuda" else "exact"
"""


def test_a_guard_on_an_option_that_falls_back_to_the_cpu_still_runs_there():
    outcome = _ported(_FALLS_BACK)
    assert "if args.device == accel.device.type:\n    count = torch.get_device_module(torch.acc" in outcome.source
    assert 'workers = count if device.type != "cpu" else 1' in outcome.source
    assert [note.line for note in outcome.left] == [11]


@pytest.mark.parametrize(("number", "index"), [("cfg.gpu", "int(cfg.gpu)"), ("int(cfg.gpu)", "int(cfg.gpu)")])
def test_a_number_in_the_name_of_a_device_may_be_a_text(number, index):
    source = f'import torch\ntorch.cuda.set_device(f"cuda:{{{number}}}")\nx = torch.ones(2).cuda()\n'
    assert f"set_device_index({index})" in _ported(source).source


@pytest.mark.parametrize("lines", ["device_ids=[local_rank],  # one\n", "# two\n    device_ids=[local_rank],\n"])
def test_comments_among_the_devices_of_replicas_stay(lines):
    source = (
        "import torch\nnet = torch.nn.parallel.DistributedDataParallel(\n    net,\n"
        f"    {lines}    # three\n    output_device=local_rank\n)\nprint(net.module)\n"
    )
    ported = _ported(source).source
    assert [word for word in ("# one", "# two", "# three") if word in source] == [
        word for word in ("# one", "# two", "# three") if word in ported
    ]
    assert "output_device" not in ported
    alone = _ported(source.replace("print(net.module)", "print(net)")).source
    assert ("# one" in source, "# two" in source) == ("# one" in alone, "# two" in alone)
    commented = source.replace("output_device=local_rank\n", "output_device=local_rank,  # four\n")
    assert "# four" in _ported(commented).source


@pytest.mark.parametrize("wraps", ["torch.nn.parallel.DistributedDataParallel", "DDP"])
def test_a_comment_behind_the_output_device_of_replicas_stays(wraps):
    source = (
        f"import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\nnet = {wraps}(\n"
        "    net, device_ids=[local_rank], output_device=local_rank,\n    # buffers are equal\n"
        "    broadcast_buffers=False,\n)\n"
    )
    outcome = _ported(source)
    assert (outcome.after, outcome.left) == (0, [])
    assert "    # buffers are equal\n    broadcast_buffers=False,\n)" in outcome.source
    assert "output_device" not in outcome.source


def test_a_device_that_switches_mixed_precision_on_does_so_on_every_accelerator():
    source = 'import torch\nscaler = torch.cuda.amp.GradScaler(enabled=device_type == "cuda" and half)\n'
    outcome = _ported(source)
    assert 'accel.scaler.create() if device_type != "cpu" and half else accel.scaler.none()' in outcome.source


OPTION = """import argparse
import torch
{imported}

def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="nccl")
    return parser{read}


if __name__ == "__main__":
    x = torch.ones(2).cuda()
"""


@pytest.mark.parametrize(
    ("imported", "read", "left"),
    [
        ("", ".parse_args()", 0),
        ("", "", 2),
        ("", "\n\n\nargs = argparse.ArgumentParser(parents=[options()]).parse_args()", 0),
        ("import submitit\n", ".parse_args()", 3),
    ],
)
def test_an_option_whose_process_may_not_train_keeps_its_default(imported, read, left):
    outcome = _ported(OPTION.format(imported=imported, read=read))
    assert len(outcome.left) == outcome.after == left


@pytest.mark.parametrize("name", ["storage", "saved.storage()", "x.untyped_storage()"])
def test_a_storage_has_another_way_to_move(name):
    outcome = _ported(f"import torch\nmap_fn = lambda storage, loc: {name}.cuda()\n")
    assert "storage" in outcome.left[0].text


def test_a_guard_on_an_option_is_false_for_another_device_that_a_user_gives():
    source = (
        "import torch\nparser.add_argument('--device', default='cuda')\nargs = parser.parse_args()\n"
        "if args.device == 'cuda':\n    torch.cuda.set_device(0)\n    x = x.cuda()\n"
        "if args.device != 'cuda':\n    x = x.to('cuda')\n"
    )
    outcome = _ported(source)
    assert (outcome.after, outcome.left) == (0, [])
    assert 'if args.device == accel.device.type != "cpu":\n    x = x.to(accel.device)\n' in outcome.source
    assert 'if not (args.device == accel.device.type != "cpu"):\n' in outcome.source


def test_the_memory_of_the_device_that_the_script_makes_current_is_the_current_ones():
    source = (
        "import torch\ntorch.cuda.set_device(args.gpu)\ntorch.cuda.reset_peak_memory_stats(args.gpu)\n"
        "print(torch.cuda.max_memory_allocated(args.gpu))\n"
    )
    outcome = _ported(source)
    assert (outcome.after, outcome.left) == (0, [])
    assert 'getattr(torch.get_device_module(), "max_memory_allocated", lambda: 0)()' in outcome.source


def test_a_name_for_a_device_may_be_none():
    source = (
        "import torch\nGPU = torch.device(where)\nx = x.cuda(GPU)\n\n\n"
        "def f(GPU):\n    return torch.ones(1).cuda(GPU)\n\n\nf(0)\n"
    )
    ported = _ported(source).source
    assert "x = x.to(GPU if GPU is not None else current_device)\n" in ported
    assert "torch.ones(1).to(GPU if GPU is not None else current_device)" in ported


def test_devices_of_a_wrapper_of_the_scripts_own_are_reported():
    outcome = _ported("import torch\nnet = Passthrough(net, device_ids=[local_rank], output_device=local_rank)\n")
    assert [note.line for note in outcome.left] == [2]


def test_a_key_that_begins_with_the_name_of_a_device_is_a_number_of_the_scripts_own():
    outcome = _ported("import torch\ntorch.cuda.set_device(args['cuda_device'])\nx = torch.ones(2).cuda()\n")
    assert (outcome.after, outcome.left) == (0, [])


def test_strings_of_other_lines_keep_their_quotes():
    line = "print(f'{x['a']}')\n"  # as Python since 3.12 reads it
    assert line in _ported(f"import torch\n{line}torch.cuda.empty_cache()\n").source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "choice",
    [
        'torch.device("cuda:0" if torch.cuda.is_available() else "cpu")',
        'torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")',
    ],
)
def test_the_cpu_has_no_number_where_a_module_chooses_between_it_and_a_device_with_one(choice, level):
    """torch.load raises for a map_location of "cpu:0"."""
    outcome = _ported(f"import torch\n\n\ndef load(path):\n    return torch.load(path, {choice})\n", level)
    assert (outcome.after, outcome.left) == (0, [])
    name = "device" if level is Level.TORCH else "current_device"
    assert f'path, torch.device({name}.type, 0) if {name}.type != "cpu" else {name})' in outcome.source


WRAPPED = """import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def wrap(model, number, **options):
    return DDP(model, device_ids=[{index}], output_device={index}{more})
"""


@pytest.mark.parametrize(
    ("index", "new"),
    [
        ("torch.cuda.current_device()", "torch.accelerator.current_device_index()"),
        ("number % torch.cuda.device_count()", "number % torch.accelerator.device_count()"),
        ("number", "number"),
    ],
)
@pytest.mark.parametrize("more", ["", ", **options"])
def test_the_devices_of_a_replica_are_those_of_any_accelerator(index, new, more):
    outcome = _ported(WRAPPED.format(index=index, more=more))
    assert (outcome.after, outcome.left) == (0, [])
    assert f"DDP(model, device_ids=[{new}] if torch.accelerator.is_available() else None{more})" in outcome.source


@pytest.mark.parametrize(
    ("line", "is_number"),
    [("main = rank == 0", True), ("main = rank in ranks", False), ("main = rank == 'cuda'", False)],
)
def test_an_index_that_is_compared_with_a_number_is_one(line, is_number):
    source = (
        f"import torch\n\n\nclass Run:\n    def __init__(self, net, rank):\n        self.rank = rank\n        {line}\n"
    )
    outcome = _ported(f"{source}        self.net = net.cuda(self.rank)\n")
    assert "move" not in [note.rule for note in outcome.left]
    assert ("net.to(torch.device(current_device.type, self.rank))" in outcome.source) is is_number


@pytest.mark.parametrize(("first", "is_left"), [("", False), ("    import torch\n", True)])
def test_a_file_whose_torch_comes_with_a_star_gets_its_own_import(first, is_left):
    source = f"from tools import *\n\n\ndef move(x):\n{first}    return x.to(torch.device('cuda'))\n"
    outcome = _ported(source)
    assert bool(outcome.left) is is_left
    assert outcome.source.startswith("from tools import *\nimport torch\n") is not is_left


LOADED = """import torch


def main(args):
    {first}
    if args.gpu is not None:
        {last}
        return state, torch.ones(2).cuda()
"""


@pytest.mark.parametrize("is_first", [True, False])
def test_a_device_that_a_line_below_makes_current_keeps_its_number(is_first):
    lines = "torch.cuda.set_device(args.gpu)", "state = torch.load(path, map_location='cuda:{}'.format(args.gpu))"
    ported = port_source(LOADED.format(first=lines[not is_first], last=lines[is_first]), Level.ROLES).source
    assert ("map_location=current_device)" in ported) is is_first
    assert ('f"{current_device.type}:{args.gpu}" if current_device.type != "cpu" else "cpu")' in ported) is not is_first


def test_strings_in_the_name_of_a_device_have_other_quotes_than_it():
    source = (
        "import torch\n\nstate = torch.load(path, map_location=f'cuda:{args.gpu}')\n"
        "torch.cuda.set_device(args.gpu)\n\n\n"
        "def f(x):\n    return x.cuda()\n\n\nif __name__ == '__main__':\n    f(1)\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert """f"{(torch.accelerator.current_accelerator() or torch.device('cpu')).type}:{args.gpu}\"""" in ported


@pytest.mark.parametrize("operator", ["%", "//", "/", "+"])
def test_nothing_is_divided_by_no_devices(operator):
    source = f"import torch\nn = 8 {operator} torch.cuda.device_count()\n"
    asked = "torch.accelerator.current_accelerator()"
    expected = f"(torch.get_device_module({asked}).device_count() if {asked} else 0)"
    expected = expected if operator == "+" else "max(torch.get_device_module().device_count(), 1)"
    assert f"n = 8 {operator} {expected}\n" in port_source(source, Level.ROLES).source


def test_a_build_for_an_accelerator_that_is_not_here_counts_no_device(monkeypatch):
    made = {}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    exec(port_source("import torch\nn = torch.cuda.device_count()\n", Level.ROLES).source, made)
    assert made["n"] == 0


@pytest.mark.parametrize("module", ["cpu", "mps"])
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_what_only_some_devices_have_is_not_asked_of_others(module, level, monkeypatch):
    figures = ("memory_allocated", "max_memory_reserved", "memory_cached", "device_count")
    calls = ", ".join(f"torch.cuda.{name}()" for name in figures)
    source = f"import torch\ndef f(device):\n    torch.cuda.reset_peak_memory_stats()\n    return {calls}\n"
    source += "def g(device):\n    return torch.cuda.memory_allocated(device)\n"
    source += "def h():\n    return torch.cuda.get_device_name(0)\n" * (level is Level.ROLES)
    ported = port_source(source, level, Known(imported=True))
    assert ported.after == 0
    real, made = torch.get_device_module, {}
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: real(device or module))
    monkeypatch.setattr(torch.accelerator, "device_count", mock.Mock(side_effect=RuntimeError))  # as torch 2.7's
    exec(ported.source, made)
    assert (made["f"]("cpu"), made["g"]("cpu")) == ((0, 0, 0, 0), 0)
    if level is Level.ROLES:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(module))
        assert made["h"]() == module


@pytest.mark.parametrize(
    ("scale", "stays"),
    [
        ("2.0**32", True), ("0.5", True), ("2.**16", False), ("2**24", False), ("1024.0", False), ("1e400", True),
        ("4 * 2**24", True), ("2.**(8*4)", True), ("args.scale", True), ("2.0**args.power", True),
    ],
)  # fmt: skip
def test_a_scaler_that_may_start_out_of_the_bounds_of_accelcores_stays_torchs(scale, stays):
    source = f"import torch\nscaler = torch.cuda.amp.GradScaler(init_scale={scale})\n"
    outcome = port_source(source, Level.ROLES)
    assert ("torch.amp.GradScaler(" in outcome.source) is stays
    assert f"={scale}" in outcome.source
    assert (outcome.after, outcome.left) == (0, [])
    assert port_source(outcome.source, Level.ROLES).source == outcome.source
