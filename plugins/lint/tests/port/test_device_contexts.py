"""`with torch.cuda.device(index):`, and the moves in it: they go to the device that the context makes current."""

import contextlib
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source

AGENT = """import torch


def moved(x, gpu_id):
    if gpu_id >= 0:
        with torch.cuda.device(gpu_id):
            x = x.cuda()
    return x
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("script", ["", "\n\nif __name__ == '__main__':\n    moved(torch.ones(2), -1)\n"])
def test_a_move_in_a_context_goes_to_its_device(level, script):
    outcome = port_source(AGENT + script, level)
    assert (outcome.after, outcome.left) == (0, [])
    assert port_source(outcome.source, level).source == outcome.source
    current, seen = [0], []

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    class Tensor:
        def to(self, where):
            seen.append((where, current[0]))
            return self

    scope = {"__name__": "agent"}
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("meta")),
        mock.patch("torch.get_device_module", return_value=mock.Mock(device=device)),
    ):
        exec(outcome.source, scope)
        scope["moved"](Tensor(), 3)
        scope["moved"](Tensor(), -1)
    assert seen == [(torch.device("meta"), 3)]  # without an index, this is the current one
    assert current == [0]


@pytest.mark.parametrize(
    ("lines", "stays"),
    [
        (
            "if torch.cuda.is_available():\n    with torch.cuda.device(rank), torch.no_grad():\n        x = x.cuda()",
            False,
        ),
        ("if args.cuda:\n    with torch.cuda.device(args.gpu):\n        x = x.cuda()", False),
        ("with torch.cuda.device(1):\n    x = x.cuda()", True),  # the CPU's module has no such context
        ("if torch.cuda.is_available():\n    with torch.cuda.device(1):\n        x = x.cuda()", False),
        ("if 1 > len(x):\n    with torch.cuda.device(1):\n        x = x.cuda()", True),
        ("with torch.cuda.device(gpu_id):\n    x = x.cuda()", True),  # -1 is the CPU
        ("if gpu_id is not None:\n    with torch.cuda.device(gpu_id):\n        x = x.cuda()", True),  # so may be -1
        ("if args.gpu:\n    with torch.cuda.device(args.gpu):\n        x = x.cuda()", True),
        ("if gpu_id != -1:\n    with torch.cuda.device(gpu_id):\n        x = x.cuda()", False),
        ("if len(gpu_ids) > 0:\n    with torch.cuda.device(gpu_ids[0]):\n        x = x.cuda()", False),
        ("with torch.cuda.device(args.local_rank):\n    x = x.cuda()", True),  # -1 without a launcher
        ("if gpu_id < 0:\n    x = x + 1\nelse:\n    with torch.cuda.device(gpu_id):\n        x = x.cuda()", True),
        ("if x.is_cuda:\n    with torch.cuda.device(x.device):\n        x = x.cuda()", True),
        ("if args.cuda:\n    with torch.cuda.device('cuda:1'):\n        x = x.cuda()", True),
        ("if args.cuda:\n    with torch.cuda.device(where):\n        x = x.cuda()", True),
        ("with torch.cuda.device(0):\n    x = x.cuda()", True),  # of each rank; accelcore selects another one
        ("if use:\n    place = 'mps'\nwith torch.cuda.device(1):\n    x = x.cuda()", True),
        ("chosen = torch.cuda.device(1)", True),
    ],
)
def test_a_context_stays_unless_each_accelerator_has_it(lines, stays):
    outcome = port_source(f"import torch\n{lines}\nprint(x)\n", Level.ROLES)
    assert ("torch.cuda.device(" in outcome.source) is stays
    assert (".get_device_module().device(" in outcome.source) is not stays
    assert bool(outcome.left) is stays
    assert (".cuda()" in outcome.source) is (stays and ".cuda()" in lines)
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


def test_an_optimizer_beside_a_context_stays_torchs_in_a_second_run():
    source = f"{AGENT}\n\nprint(torch.optim.SGD(moved(torch.ones(2), 1), 0.1))\n"
    once = port_source(source, Level.ROLES).source
    assert "torch.optim.SGD(" in once
    assert port_source(once, Level.ROLES).source == once
