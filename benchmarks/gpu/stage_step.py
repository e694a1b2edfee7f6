"""A training step of a tiny model, where what a library adds is largest beside the step itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.gpu import loops
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.loops import Loop, Mode, Work
from benchmarks.gpu.measure import Entry, Measured, measure, peers
from benchmarks.gpu.results import Case, Findings, Goal
from benchmarks.overhead import BATCH, BATCHES, CLASSES, WIDTH

__all__ = ["make_work", "run"]

HAND, TWIN, TRAINER = "by hand", "by hand, again", "trainer"
HAND_GRAPH, TRAINER_GRAPH = "by hand, graph", "trainer, graph"
# The loop, and whether it is captured.
LOOPS: dict[str, tuple[Loop, bool]] = {
    HAND: (loops.by_hand, False),
    TWIN: (loops.by_hand, False),
    TRAINER: (loops.with_trainer, False),
    HAND_GRAPH: (loops.captured_by_hand, True),
    TRAINER_GRAPH: (loops.with_trainer, True),
}
PRECISIONS = ("fp32", "bf16")


def run(device: Device, deadline: Deadline) -> Findings:
    """A table for each precision; accelerate allows one at a time in a process."""
    rounds, seconds = (2, 0.0) if device.toy else (300, 0.02)
    measured, goals = Measured(), []
    for number, precision in enumerate(PRECISIONS):
        share = Deadline(deadline.left / (len(PRECISIONS) - number))
        # A learning rate of 0 keeps the weights, and so the numbers that are computed with, what they are.
        work = partial(make_work, device, lr=0.0)
        entries = [
            *(
                Entry(precision, name, HAND, work, loop, Mode(precision, graph=graph))
                for name, (loop, graph) in LOOPS.items()
            ),
            *peers(precision, HAND, work, Mode(precision)),
        ]
        differences = {entry.name: _difference(entry, device) for entry in entries if not entry.missing}
        found = measure(entries, device, share, rounds=rounds, seconds=seconds, reserve=5.0)
        found.cases = [_with_difference(case, differences.get(case.name)) for case in found.cases]
        measured.extend(found)
        goals += _goals(precision, found, differences)
    settings = {
        "model": f"3 x (Linear({WIDTH}, {WIDTH}), ReLU), Linear({WIDTH}, {CLASSES})",
        "batch": [BATCH, WIDTH],
        "optimizer": "AdamW(fused=True)",
        "seconds a sample": seconds,
    }
    return Findings(settings, measured.cases, goals, measured.failures)


def _goals(precision: str, found: Measured, differences: dict[str, float | None]) -> list[Goal]:
    def ratio(name: str, base: str) -> float | None:
        return found.ratio(f"{precision}: {name}", f"{precision}: {base}")

    return [
        Goal(f"step, {precision}: trainer / by hand", 1.01, ratio(TRAINER, HAND)),
        Goal(f"step, {precision}: trainer, graph / by hand, graph", 1.01, ratio(TRAINER_GRAPH, HAND_GRAPH)),
        Goal(f"step, {precision}: trainer, graph / by hand", 0.5, ratio(TRAINER_GRAPH, HAND)),
        *(
            Goal(f"step, {precision}: {name}: largest difference of a weight from by hand", 1e-3, differences[name])
            for name in (TRAINER, TRAINER_GRAPH)
        ),
    ]


def _difference(entry: Entry, device: Device) -> float | None:
    """Train by hand and by this loop: the largest difference of a weight; None where the loop does not run here."""
    if loops.undeclared(entry.mode, device):
        return None
    expected, found = make_work(device, lr=1e-3), make_work(device, lr=1e-3)
    try:
        train = entry.loop(found, entry.mode, device)
        by_hand = loops.by_hand(expected, Mode(entry.mode.precision), device)
        for _ in range(5):
            by_hand()
            train()
    except Exception:  # noqa: BLE001  # the measurement, which comes next, reports it
        return None
    return max(_largest(a, b) for a, b in zip(expected.model.parameters(), found.model.parameters(), strict=True))


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def _with_difference(case: Case, difference: float | None) -> Case:
    values = {} if difference is None else {"largest_weight_difference": difference}
    return replace(case, values={**case.values, **values})


def make_work(device: Device, *, lr: float) -> Work:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device.torch)
    batches = [(torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(BATCHES)]
    return Work(model, _loss, [tuple(part.to(device.torch) for part in batch) for batch in batches], lr)


def _loss(model: Callable[..., Tensor], batch: Sequence[Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
