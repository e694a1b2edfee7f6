"""The index of a device that a function returns, or an object keeps: its users may read it or make it current."""

from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from port_sources import imported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("test", ["x.device != here()", "x.device.type == 'cpu'"])
@pytest.mark.parametrize("name", ['"cuda", torch.cuda.current_device()', 'f"cuda:{torch.cuda.current_device()}"'])
def test_a_device_that_a_function_returns_keeps_its_index(level, test, name):
    source = f"import torch\n\n\ndef here():\n    return torch.device({name})\n\n\ndef check(x):\n    return {test}\n"
    module = imported(port_source(source, level, Known(imported=True)).source)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=3),
    ):
        assert module.here() == torch.device("meta", 3)
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=None):
        assert module.here() == torch.ones(1).device


RANKS = """import torch


class Job:
    def __init__(self, local_rank):
        torch.cuda.set_device(local_rank)
        self.device = torch.device({0})


def start(local_rank):
    torch.cuda.set_device(local_rank)
    return local_rank, torch.device({0})
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("name", ['"cuda", local_rank', 'f"cuda:{local_rank}"'])
def test_a_device_that_is_made_current_and_given_to_others_keeps_its_index(level, name):
    module = imported(port_source(RANKS.format(name), level, Known(imported=True)).source)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "set_device_index") as made_current,
    ):
        assert module.Job(2).device == torch.device("meta", 2)
        assert module.start(3) == (3, torch.device("meta", 3))
    assert made_current.call_args_list == [mock.call(2), mock.call(3)]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_for_a_move_needs_no_index(level):
    source = "import torch\n\n\ndef put(x):\n    return x.to(torch.device('cuda', torch.cuda.current_device()))\n"
    ported = port_source(source, level, Known(imported=True)).source
    assert "current_device_index" not in ported


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize(("line", "keeps"), [("", True), ("torch.cuda.set_device(local_rank)\n", False)])
def test_a_rank_keeps_its_number_if_only_an_imported_file_may_make_its_device_current(line, keeps, steered):
    source = (
        "import os\nimport deepspeed\nimport torch\n\nlocal_rank = int(os.getenv('LOCAL_RANK', '0'))\n"
        f"{line}device = torch.device(f'cuda:{{local_rank}}')\nnet = torch.nn.Linear(2, 2).to(device)\n"
    )
    ported = port_source(source, Level.ROLES, Known(steered=steered)).source
    assert (", local_rank)\nnet = " in ported) is keeps


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_that_a_function_returns_by_a_number_keeps_it(level):
    source = (
        "import torch\n\n\ndef setup(backend, rank):\n"
        "    if backend == 'nccl':\n        torch.cuda.set_device(rank)\n\n\n"
        "def get_device(rank):\n    if torch.cuda.is_available():\n        return torch.device(f'cuda:{rank}')\n"
        "    return torch.device('cpu')\n"
    )
    ported = port_source(source, level, Known(imported=True)).source
    assert "device.type, rank)" in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("name", ["'cuda:' + gpu", "'cuda:' + args.gpu"])
def test_a_text_that_follows_the_name_of_a_device_is_its_index(level, name):
    source = f"import torch\n\n\ndef put(x, gpu, args):\n    device = {name}\n    return x.to(device)\n"
    outcome = port_source(source, level, Known(imported=True))
    assert (outcome.after, outcome.left) == (0, [])
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")):
        imported(outcome.source).put(x := mock.Mock(), "3", mock.Mock(gpu="3"))
    x.to.assert_called_once_with("meta:3")
    assert port_source(outcome.source, level, Known(imported=True)).source == outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("given", "is_left"), [("device", False), ("self.device", False), ("gpu", True)])
def test_a_move_to_a_device_that_is_made_of_the_scripts_own_takes_it(level, given, is_left):
    source = (
        "import torch\n\n\nclass Put:\n    def __init__(self, device):\n        self.device = device\n\n"
        f"    def put(self, x, device, gpu):\n        return x.cuda(torch.device({given}))\n"
    )
    outcome = port_source(source, level, Known(imported=True))
    assert bool(outcome.left) is is_left
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")):
        made = imported(outcome.source).Put("meta")
        assert is_left or made.put(torch.ones(1), "meta", 0).device.type == "meta"


@pytest.mark.parametrize(
    ("options", "chosen", "is_kept"),
    [
        ("parser.add_argument('--device', type=int, default=0)", "args.device", True),
        ("parser.add_argument('--device', default='cuda:0')\ndevice = parser.parse_args().device", "device", True),
        ("device = torch.device('cuda')", "device", False),
    ],
)
def test_a_device_that_an_option_makes_current_is_that_of_the_moves(options, chosen, is_kept):
    """What is called a device may be its number, and accelcore.select() would make the first one current."""
    source = (
        f"import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n{options}\nargs = parser.parse_args()\n"
        f"torch.cuda.set_device({chosen})\nnet = torch.nn.Linear(2, 2).cuda()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ("accelcore.select()" in ported) is not is_kept
    assert ("net = torch.nn.Linear(2, 2).to(current_device)" in ported) is is_kept
