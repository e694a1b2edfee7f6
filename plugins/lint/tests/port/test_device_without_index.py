"""Devices that are made current, and that may have no index: torch_npu takes them, torch's own function does not."""

import pytest
from accelcore_lint.port import Level, port_source

HEAD = "import torch\nimport torch_npu\n"
MAY_LACK = [
    'def f(device=None):\n    own = torch.device(device or "npu:0")\n    torch.npu.set_device(own)\n    return own\n',
    "def f(device):\n    torch.npu.set_device(device)\n    return x.npu()\n",
    "def f(name: str):\n    torch.npu.set_device(name)\n    return x.to(name)\n",
    "def f(x):\n    torch_npu.npu.set_device(x.device)\n    return x\n",
    "from torch.npu import set_device\n\n\ndef f(where):\n    set_device(where)\n    return x.npu()\n",
    "class A:\n    def __init__(self, args):\n        torch.npu.set_device(args.place)\n        self.x = x.npu()\n",
    'def f(x, many):\n    gpu = 1 if many else "npu"\n    torch.npu.set_device(gpu)\n    return x.npu()\n',
]


@pytest.mark.parametrize("lines", MAY_LACK)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_of_torch_npu_that_may_have_no_index_is_left(lines, level):
    outcome = port_source(HEAD + lines, level)
    assert "set_device_index(" not in outcome.source
    assert "device call" in {note.rule for note in outcome.left}
    assert port_source(outcome.source, level).source == outcome.source


@pytest.mark.parametrize("vendor", ["cuda", "npu"])
@pytest.mark.parametrize("made", ['"{}"', 'torch.device("{}")', 'torch.device("{}:0")'])
def test_a_device_that_level_torch_writes_without_an_index_is_left(vendor, made):
    lines = f"device = {made.format(vendor)}\ntorch.{vendor}.set_device(device)\nx = torch.ones(2).to(device)\n"
    outcome = port_source(HEAD + lines, Level.TORCH)
    assert f"\ntorch.{vendor}.set_device(device)\n" in outcome.source
    assert {note.line for note in outcome.left} == {4}


@pytest.mark.parametrize(
    "number", ["rank", "args.gpu", "device_id", "ids[rank]", "gpus[0]", "x.get_device()", 'f"npu:{i}"']
)
def test_the_number_of_a_device_makes_it_current_on_all(number):
    lines = f"def f(x, rank, args, device_id, ids, gpus, i):\n    torch.npu.set_device({number})\n    return x.npu()\n"
    outcome = port_source(HEAD + lines, Level.ROLES)
    assert "torch.accelerator.set_device_index(" in outcome.source
    assert (outcome.after, outcome.left) == (0, [])
