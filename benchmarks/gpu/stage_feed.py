"""Feeding a training from host memory: `trainer.batches` beside a loader by hand, and batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.results import Case, Findings
from benchmarks.gpu.stage_profile import busy, events_on_gpu
from benchmarks.paired import compare, sample
from benchmarks.report import Row, Table, print_table

__all__ = ["run"]

RESIDENT = "batches on the device"
CLASSES = 10
_MOST_ROUNDS = 10
_RESERVE = 20.0  # seconds for the profiles at the end


def run(device: Device, deadline: Deadline) -> Findings:
    """Time an epoch in each way. Without overlap, its copies add to the time of the steps."""
    count, batch, size = (4, 2, 16) if device.toy else (16, 256, 128)
    data = TensorDataset(torch.randn(count, batch, 3, size, size), torch.randint(CLASSES, (count, batch)))
    loader = DataLoader(data, batch_size=None, pin_memory=device.cuda)  # to collate images would hide the copies
    resident = [tuple(part.to(device.torch) for part in each) for each in loader]
    hand, ours, there = (_stepper(device) for _ in range(3))

    def moved(non_blocking: bool) -> Iterable[list[Tensor]]:
        return ([part.to(device.torch, non_blocking=non_blocking) for part in each] for each in loader)

    def epoch(step: Callable[[object], object], batches: Callable[[], Iterable[object]]) -> Callable[[], None]:
        def train() -> None:
            for each in batches():
                step(each)

        return train

    cases: dict[str, Callable[[], None]] = {
        RESIDENT: epoch(there, lambda: resident),
        "by hand": epoch(hand, lambda: moved(False)),
        "by hand, non_blocking": epoch(hand, lambda: moved(True)),
        "by hand, non_blocking, again": epoch(hand, lambda: moved(True)),
        "trainer.batches": epoch(ours, lambda: ours.batches(loader)),
    }
    start = device.clock()
    for train in cases.values():
        train()
    a_round = device.clock() - start
    rounds = 2 if device.toy else max(2, min(_MOST_ROUNDS, int((deadline.left - _RESERVE) / a_round)))
    timings = compare(sample(cases, rounds=rounds, clock=device.clock), RESIDENT)
    print_table(Table("feed", RESIDENT, "ms", {}, [Row(name, timing, "") for name, timing in timings.items()]))
    settings = {"batches": count, "batch": [batch, 3, size, size], "bytes a batch": 12 * batch * size * size}
    found = [
        Case("feed", name, timing, rounds, RESIDENT, values=_overlap(cases[name], device))
        for name, timing in timings.items()
    ]
    return Findings(settings, found)


def _overlap(train: Callable[[], None], device: Device) -> dict[str, float]:
    """Profile an epoch: the share of the time of copies to the GPU in which kernels run, too."""
    if not device.cuda:
        return {}
    spans = [
        ("HtoD" in event.name, (event.time_range.start, event.time_range.end)) for event in events_on_gpu(train, device)
    ]
    copies, others = (busy(span for copies, span in spans if copies is wanted) for wanted in (True, False))
    both = copies + others - busy(span for _, span in spans)
    return {"overlapped_copies": both / copies} if copies else {}


def _stepper(device: Device) -> object:
    torch.manual_seed(0)
    convolutions = [layer for width in (64, 128) for layer in (nn.LazyConv2d(width, 3, stride=2), nn.ReLU())]
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(CLASSES))
    model(torch.randn(1, 3, 16, 16))
    optimizer = device.accel.optimizers.create("adamw", model.parameters(), lr=1e-3)
    return device.accel.trainer(
        model, optimizer, loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]), precision="bf16"
    )
