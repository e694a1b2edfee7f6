"""Scripts that choose a device by a number: an option, a rank, or the number of a device in a loop."""

import sys
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from port_sources import imported


@pytest.mark.parametrize("other", ["", "setup(3)\n", "start = setup\n"])
def test_a_parameter_is_a_local_rank_if_every_call_passes_one(other):
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        "def setup(gpu):\n    return torch.zeros(1).cuda(gpu)\n\n\n"
        f"def work(rank):\n    setup(rank)\n\n\n{other}mp.spawn(work, nprocs=2)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert outcome.after == 0
    assert (".to(gpu if gpu is not None else current_device)" in outcome.source) is bool(other)


def test_a_rank_of_minus_one_is_a_single_process():
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        "def work(gpu):\n    x = torch.ones(2)\n    if gpu != -1:\n        x = x.cuda(gpu)\n\n\n"
        "mp.spawn(work, nprocs=2) if mp.active_children() else work(-1)\n"
    )
    assert "accelcore.select(local_rank=max(gpu, 0))" in port_source(source, Level.ROLES).source


def test_devices_that_the_script_chooses_elsewhere_stay_where_there_is_an_accelerator():
    source = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nfrom tools import device_of\n"
        "model = DDP(net.to(device_of()), device_ids=[device_of()])\n"
    )
    assert (
        "device_ids=[device_of()] if torch.accelerator.is_available() else None"
        in port_source(source, Level.ROLES).source
    )


BY_HAND = """import argparse
import torch


def setup(rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())


def train(args):
    setup(args.rank)
    with torch.cuda.amp.autocast():
        return torch.ones(2).cuda()


parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
train(parser.parse_args())
"""


def test_a_process_whose_device_the_script_chooses_takes_the_current_device():
    outcome = port_source(BY_HAND, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "accelcore" not in outcome.source
    assert "torch.accelerator.set_device_index(rank % torch.accelerator.device_count())" in outcome.source
    assert (
        'torch.autocast(current_device.type, dtype=torch.float16, enabled=current_device.type != "cpu")'
        in outcome.source
    )
    assert "torch.ones(2).to(current_device)" in outcome.source


def test_a_rank_of_the_launcher_chooses_no_device_by_hand():
    source = BY_HAND.replace("args.rank)", "torch.distributed.get_rank())").replace('"--rank"', '"--seed"')
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "set_device" not in outcome.source
    assert "torch.ones(2).to(accel.device)" in outcome.source


@pytest.mark.parametrize(("value", "device"), [("0", "accel.device"), ("1", "torch.device(current_device.type, gpu)")])
def test_a_name_of_the_first_device_is_the_only_one(value, device):
    source = f"import torch\ngpu = {value}\nx = torch.ones(2).cuda(gpu)\ny = x.cuda(gpu)\n"
    assert port_source(source, Level.ROLES).source.count(f".to({device})") == 2


def test_the_number_of_a_rank_is_a_device_also_as_a_keyword():
    source = (
        "import torch\nimport torch.distributed as dist\n\n\ndef main():\n    rank = dist.get_rank()\n"
        "    device = rank % torch.cuda.device_count()\n    net = torch.nn.Linear(2, 2).to(device)\n"
        "    return net(torch.ones(2, device=device)), torch.ones(2).to(device=device)\n\n\nmain()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ported.count("accel.device)") == 3
    assert "device=device" not in ported


@pytest.mark.parametrize(
    ("index", "device"),
    [
        ("1", "torch.device(current_device.type, 1)"),
        ("i", "i if i is not None else current_device"),
        ("i % 2", "i % 2"),
        ("ids[0]", "ids[0] if ids[0] is not None else current_device"),
        ("0", "accel.device"),
    ],
)
def test_the_first_device_of_several_keeps_its_number(index, device):
    source = (
        f"import torch\nids = find()\nnets = []\nfor i in ids:\n    nets.append(torch.nn.Linear(2, 2).cuda({index}))\n"
    )
    outcome = port_source(f"{source}x = torch.ones(2).cuda(0)\noptimizer = torch.optim.SGD(nets, 0.1)\n", Level.ROLES)
    first = "accel.device" if index == "0" else "torch.device(current_device.type, 0)"
    assert f"Linear(2, 2).to({device})" in outcome.source
    assert f"torch.ones(2).to({first})" in outcome.source
    assert ("torch.optim.SGD(" in outcome.source) is (index != "0")
    assert not outcome.left


@pytest.mark.parametrize("index", ["pick(i)", "i or j", "ids[pick()]", "'cuda' + i"])
def test_an_index_that_may_have_effects_or_be_none_is_left(index):
    source = f"import torch\n\n\ndef move(x, i, j, ids):\n    return x.cuda({index})\n"
    assert f"x.cuda({index})" in port_source(source, Level.ROLES).source


def test_horovod_chooses_the_device_and_wraps_the_optimizer():
    source = (
        "import horovod.torch as hvd\nimport torch\nhvd.init()\ntorch.cuda.set_device(hvd.local_rank())\n"
        "net = torch.nn.Linear(2, 2).cuda()\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "torch.accelerator.set_device_index(hvd.local_rank())" in outcome.source
    assert "torch.optim.SGD(" in outcome.source
    assert "accelcore" not in outcome.source


@pytest.mark.parametrize(
    ("line", "reports"),
    [
        ('print(f"cuda: {n}")', 0),
        ("from apex.fp16_utils import *", 1),
        ("if torch.version.cuda > '11':\n    print(2)", 1),
        ("print(torch.version.cuda)", 0),
    ],
)
def test_what_names_a_device_in_another_form_is_reported(line, reports):
    outcome = port_source(f"import torch\n{line}\n", Level.ROLES)
    assert [note.line for note in outcome.left] == [2] * reports
    assert len(outcome.harmless) == (line == "print(torch.version.cuda)")
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


def test_a_module_of_apex_that_accelcore_does_not_have_is_counted_beside_accelcores_apex():
    source = "import torch\nfrom accelcore import apex\nfrom apex.fp16_utils import *\napex.amp.initialize(model)\n"
    outcome = port_source(source, Level.ROLES)
    assert (outcome.before, outcome.after) == (1, 1)


LAUNCHED = """import os
import torch


def main():
    torch.distributed.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    for x in torch.utils.data.DataLoader([1.0]):
        torch.nn.Linear(1, 1).cuda(rank)(x.cuda(rank)).backward()
    {last}


if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("last", "is_left"),
    [
        ("", False),
        ("net.eval()", False),
        ("print(rank)", True),
        ("print(locals())", True),
        ("rank = ask()", True),
        ("print(f'{rank}')", True),
    ],
)
def test_a_rank_is_not_read_for_lines_that_are_gone(last, is_left):
    outcome = port_source(LAUNCHED.format(last=last), Level.ROLES)
    assert ('rank = int(os.environ["LOCAL_RANK"])' in outcome.source) is is_left
    assert outcome.after == 0
    unused = "import os\nimport torch\nrank = int(os.environ['LOCAL_RANK'])\nx = torch.ones(2).cuda()\n"
    assert "LOCAL_RANK" in port_source(unused, Level.ROLES).source


def test_an_option_for_another_device_keeps_its_number_and_torchs_optimizer():
    source = (
        "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--cuda', type=int, default=0)\nargs = parser.parse_args()\n"
        "if args.cuda != -1:\n    device = torch.device('cuda:' + str(args.cuda))\n"
        "else:\n    device = torch.device('cpu')\nmodel = torch.nn.Linear(2, 2).to(device)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
    )
    ported = port_source(source, Level.ROLES)
    assert (ported.after, ported.left) == (0, [])
    assert "torch.device(current_device.type, args.cuda)" in ported.source
    assert "torch.optim.SGD(" in ported.source


@pytest.mark.parametrize(
    ("model", "before", "kept"),
    [
        ("nn.Linear(2, 2)", "", False),
        ("nn.DataParallel(nn.Linear(2, 2))", "", True),
        ("nn.DataParallel(nn.Linear(2, 2))", "torch.cuda.manual_seed(seed)\n", True),
        ("nn.DataParallel(nn.Linear(2, 2))", "torch.manual_seed(seed)\n", False),
    ],
)
def test_a_seed_of_all_devices_seeds_all_of_them(model, before, kept):
    source = f"import torch\nfrom torch import nn\n\nseed = 3\n{before}"
    source += f"torch.cuda.manual_seed_all(seed)\nmodel = {model}.cuda()\n"
    assert ("torch.cuda.manual_seed_all(seed)" in port_source(source, Level.ROLES).source) is kept


def test_the_number_of_the_current_device_is_a_number():
    source = (
        "import torch\n\n\ndef move(net):\n    here = torch.cuda.current_device()\n    return net.cuda(device=here)\n"
    )
    assert "net.to(torch.device(current_device.type, here))" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("return [x.cuda(i) for i in range(n)]", True),
        ("return [[x.cuda(i) for y in x] for i in range(n)]", True),
        ("for i in range(n):\n        x = [x.cuda(i)]", True),
        ("return [x.cuda(i) for i in names]", False),
        ("return [[x.cuda(i) for i in names] for i in range(n)]", False),
        ("return [i for i in range(n)], x.cuda(i)", False),
    ],
)
def test_what_counts_the_devices_in_a_loop_is_a_number(line, number):
    ported = port_source(f"import torch\n\n\ndef f(x, n, names, i):\n    {line}\n", Level.ROLES).source
    assert ("x.to(torch.device(current_device.type, i))" in ported) is number
    assert ("x.to(i if i is not None else current_device)" in ported) is not number


@pytest.mark.parametrize(
    ("default", "new"),
    [
        ("cuda:1", 'f"{current_device.type}:1" if current_device.type != "cpu" else "cpu"'),
        ("cuda:0", "str(accel.device)"),
    ],
)
def test_an_option_whose_default_is_another_device_keeps_its_number(default, new):
    source = (
        "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument('--device', default='{default}')\nargs = parser.parse_args()\n"
        "net = torch.nn.Linear(2, 2).to(args.device)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert f"default={new})" in ported
    assert ("torch.optim.SGD(" in ported) is (default == "cuda:1")


@pytest.mark.parametrize("sets", ["", "torch.cuda.set_device(local_rank)\n"])
def test_a_rank_loses_its_number_only_if_something_sets_its_device(sets):
    source = (
        "import os\nimport torch\n\nlocal_rank = int(os.environ['LOCAL_RANK'])\n"
        f"{sets}other = torch.ones(1).cuda(device_ids[local_rank])\n"
        'x = torch.ones(1).to(torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() and use else "cpu"))\n'
        "y = torch.ones(1).cuda(local_rank)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert outcome.after == 0
    assert ('f"{current_device.type}:{local_rank}" if' in outcome.source) is not bool(sets)
    assert ("y = torch.ones(1).to(torch.device(current_device.type, local_rank))" in outcome.source) is not bool(sets)


@pytest.mark.parametrize(
    ("line", "index"),
    [
        ("x = torch.ones(1).cuda()", ""),
        ("x = torch.ones(1).to('cuda:1')", "0"),
        ("torch.cuda.set_device(args.gpu)", "0"),
        ("torch.cuda.set_device(local_rank)", "0"),
        ("def f():\n    return torch.ones(1).cuda()", "0"),
    ],
)
def test_the_memory_of_the_first_device_is_that_of_the_process_if_it_has_no_other(line, index):
    source = f"import torch\n{line}\nused = torch.cuda.memory_reserved(0)\n"
    ported = port_source(source, Level.ROLES).source
    assert f'(torch.get_device_module(), "memory_reserved", lambda{" _" if index else ""}: 0)({index})' in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("test", ["str(x.device) == dev", "dev != str(x.device)"])
@pytest.mark.parametrize("name", ['"cuda:0"', '"cuda:0" if torch.cuda.is_available() else "cpu"'])
def test_a_name_keeps_its_index_in_a_file_that_compares_it_with_that_of_a_tensor(level, test, name):
    ported = port_source(f"import torch\n\ndev = {name}\nx = torch.ones(1, device=dev)\nassert {test}\n", level)
    assert not ported.left
    for accelerator, expected in ((torch.device("meta"), "meta:0"), (None, "cpu")):
        made, accelcore = {}, mock.Mock()
        accelcore.select.return_value.device = torch.device(expected)
        with (
            mock.patch.dict(sys.modules, {"accelcore": accelcore}),
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=accelerator),
        ):
            exec(ported.source.rpartition("\nx =")[0], made)
        assert made["dev"] == expected


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("moved", ["x.to(device)", "torch.zeros(2, device=device)", "x.to(device, non_blocking=True)"])
def test_the_number_of_the_current_device_in_moves_becomes_the_device(moved, level):
    source = f"import torch\n\n\ndef move(x):\n    device = torch.cuda.current_device()\n    return {moved}\n"
    ported = port_source(source, level)
    assert "current_device_index" not in ported.source  # there is none on the CPU, and 0 is no CPU
    assert (ported.after, ported.left) == (0, [])


@pytest.mark.parametrize(
    ("lines", "is_left"),
    [
        ("opt.device = torch.cuda.current_device()", True),
        ("device = torch.cuda.current_device()\nx.to(device)\nprint(device)", True),
        ("device = torch.cuda.current_device()\nprint(device)", False),
        ("number = torch.cuda.current_device()", False),
        ("if torch.cuda.is_available():\n    opt.device = torch.cuda.current_device()", False),
    ],
)
def test_the_number_of_the_current_device_is_left_where_it_may_be_a_device_or_a_number(lines, is_left):
    ported = port_source(f"import torch\n\n{lines}\n", Level.ROLES)
    assert bool(ported.left) is is_left
    assert ("torch.cuda.current_device()" in ported.source) is is_left


def test_a_name_of_a_device_for_another_library_keeps_its_number():
    source = (
        "import torch\n\n\ndef work(rank, serve):\n    torch.cuda.set_device(rank)\n"
        '    return serve(device=f"cuda:{torch.cuda.current_device()}")\n'
    )
    work = imported(port_source(source, Level.ROLES).source).work
    assert work(3, dict) == {"device": "cpu"}
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "set_device_index"),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=3),
    ):
        assert work(3, dict) == {"device": "meta:3"}


@pytest.mark.parametrize(("library", "keeps"), [("deepspeed", True), ("accelerate", False)])
def test_a_rank_keeps_its_number_if_a_library_makes_the_device_current_later(library, keeps):
    source = (
        f"import {library}\nimport torch\n\nargs.local_rank = int(os.environ['LOCAL_RANK'])\n"
        f"{library}.init_distributed()\n"
        "model = model.to(args.local_rank)\nx = torch.ones(2).cuda()\n"
    )
    device = "torch.device(current_device.type, args.local_rank)" if keeps else "current_device"
    assert f"model.to({device})" in port_source(source, Level.ROLES).source


def test_a_default_that_moves_when_it_is_imported_stays_on_the_cpu_without_a_device():
    source = "import torch\n\n\ndef show(x, mean=torch.ones(3).cuda()):\n    return x + mean\n"
    ported = port_source(source, Level.ROLES).source
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=False),
        mock.patch.object(
            torch.accelerator,
            "current_accelerator",
            side_effect=lambda check_available=False: None if check_available else torch.device("cuda"),
        ),
    ):
        assert imported(ported).show(1).tolist() == [2, 2, 2]
