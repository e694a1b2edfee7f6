"""One process for several devices: `DataParallel`."""

from __future__ import annotations

from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script

_CLASSES = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel")


def _check(script: Script) -> Iterator[Mark]:
    for call, _ in script.calls(lambda name: name in _CLASSES):
        yield Mark(
            call,
            "DataParallel copies the model in each step, and works on few devices.",
            'Start one process for each device (accelcore run --nproc N, or torchrun) and write parallel="ddp" in '
            "accel.trainer(), or DistributedDataParallel.",
        )


RULE = Rule(
    code="ACC108",
    name="data-parallel",
    about="`torch.nn.DataParallel` drives several devices from one process. It replicates the model in every step "
    "and holds the interpreter's lock. torch itself advises against it; backends of other vendors often lack it.",
    check=_check,
    found="import torch\nmodel = torch.nn.DataParallel(torch.nn.Linear(2, 2))",
    clean="from torch.nn.parallel import DistributedDataParallel as DDP\n\ndef wrap(model):\n    return DDP(model)",
)
