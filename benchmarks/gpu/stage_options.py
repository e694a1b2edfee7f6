"""What the trainer's options cost, in time and memory, on GPT-2 124M in bf16: each beside the trainer without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcore import Observer
from benchmarks.gpu import loops
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT2_124M, Block
from benchmarks.gpu.loops import Mode
from benchmarks.gpu.measure import Entry, measure
from benchmarks.gpu.results import Findings
from benchmarks.gpu.stage_gpt import TOY, make_work

__all__ = ["run"]

BATCH = 8
PLAIN = "trainer"


class Losses(Observer):
    """Observer that keeps the sum of losses on the device."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def loss(self, loss: Tensor) -> None:
        self.total = loss if self.total is None else self.total + loss


def run(device: Device, deadline: Deadline) -> Findings:
    """One table; a sample is a micro-batch, also where a window has four."""
    shape = TOY if device.toy else GPT2_124M
    work = partial(make_work, device, shape, 4 if device.toy else BATCH)
    one = torch.ones((), device=device.torch)
    options: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "trainer, again": {},
        "accumulate=4": {"accumulate": 4},
        "clip_norm=1.0": {"clip_norm": 1.0},
        "weight=": {"weight": lambda batch: one},
        "an observer of losses": {"observers": [Losses()]},
        'precision="O2"': {"precision": "O2"},
        'precision="O1"': {"precision": "O1"},
        "flat=True": {"flat": True},
        "checkpoint=": {"checkpoint": Block},
        "offload=": {"offload": Block},
    }
    declared = device.accel.capabilities
    missing = {} if declared.streams and declared.pinned_memory else {"offload=": "the backend declares no streams"}
    if "float16" not in declared.autocast_dtypes:
        missing |= dict.fromkeys(('precision="O1"', 'precision="O2"'), "the backend declares no fp16")
    entries = [
        Entry("options", name, PLAIN, work, partial(loops.with_trainer, **chosen), Mode("bf16"), missing.get(name, ""))
        for name, chosen in options.items()
    ]
    entries.append(Entry("options", "fp16, with its loss scale", PLAIN, work, loops.with_trainer, Mode("fp16")))
    rounds, seconds = (2, 0.0) if device.toy else (20, 0.3)
    found = measure(entries, device, deadline, rounds=rounds, seconds=seconds)
    return Findings({"batch": BATCH, "model": "GPT-2 124M"}, found.cases, failures=found.failures)
