"""What a training step costs beside the same step written by hand with torch.

A tiny model on one thread, where what a library adds to each step is largest beside the step itself. All loops train
the same model with the same optimizer; before any is timed, each must have made of the same weights what the loop by
hand makes of them. Times are processor time, which is what a step on a CPU consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from time import process_time

import torch
from torch import nn

import accelcore
from benchmarks import loops
from benchmarks.loops import Batches, Loop, Task
from benchmarks.paired import compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch", "accelerate", "lightning-fabric", "mmengine")
WIDTH, CLASSES, BATCH, BATCHES = 32, 10, 16, 8

HAND, TWIN, TRAINER = "by hand", "by hand, again", "accelcore: trainer(batch)"
CALLS, ACCELERATE, ACCUMULATE = "accelcore: the three calls", "accelerate", "accelerate, accumulate()"
OURS, FLAT = "accelcore, adamw it made", "accelcore, adamw it made, flat=True"
BY_HAND_OURS, NO_UPDATE = "by hand, adamw accelcore made", "by hand, without the update"
FABRIC, MMENGINE = "Lightning Fabric", "MMEngine"
LOOPS: Mapping[str, Loop] = {
    HAND: loops.by_hand,
    TWIN: loops.by_hand,
    NO_UPDATE: loops.forward_and_backward,
    BY_HAND_OURS: loops.by_hand,
    TRAINER: loops.accelcore_trainer,
    CALLS: loops.accelcore_calls,
    OURS: loops.accelcore_trainer,
    FLAT: loops.accelcore_flat,
    ACCELERATE: loops.accelerate,
    ACCUMULATE: loops.accelerate_accumulate,
    FABRIC: loops.fabric,
    MMENGINE: loops.mmengine,
}
MADE = (OURS, FLAT, BY_HAND_OURS)  # with `accel.optimizers.create` in place of torch's class
MODULES = {ACCELERATE: "accelerate", ACCUMULATE: "accelerate", FABRIC: "lightning_fabric", MMENGINE: "mmengine"}
TASKS = {
    "fp32": Task(),
    "bf16 autocast": Task(precision="bf16"),
    "fp32, accumulate=4": Task(accumulate=4),
    "fp32, clip_norm=1.0": Task(clip_norm=1.0),
}
# Where weights may differ: by how much, relative to them. A kernel rounds what fills its vectors and what is left over
# differently in the last bit, and in flat memory other elements are left over.
TOLERANCES = {OURS: 1e-5, FLAT: 1e-5, BY_HAND_OURS: 1e-5, **dict.fromkeys(MODULES, 1e-4)}
GOALS = [(task, TRAINER, 1.02) for task in TASKS] + [("fp32", OURS, 0.85)]


def run(quick: bool) -> Iterator[Table]:
    """One table for each task; `trainer(batch)` with the user's own optimizer has a goal in all of them."""
    torch.set_num_threads(1)
    rounds, seconds = (80, 0.005) if quick else (400, 0.005)
    for title, task in TASKS.items():
        # Without its context for it, accelerate does not accumulate.
        left_out = ({ACCELERATE} if task.accumulate > 1 else set()) | ({NO_UPDATE} if task != Task() else set())
        names = [name for name in LOOPS if name not in left_out]
        notes = {name: _verify(task, name) for name in names}
        # A learning rate of 0 keeps the weights: what is timed is the same arithmetic from first to last, without
        # the denormal numbers that come up when a model has learned its batches by heart.
        cases = {name: _prepare(task, name, lr=0.0)[1] for name in names if not _missing(task, name)}
        assert torch.get_num_threads() == 1, "a peer has changed the number of threads"
        timings = compare(sample(cases, rounds=rounds, seconds=seconds, per=BATCHES, clock=process_time), HAND)
        yield Table(
            title=f"{title}: one batch",
            base=HAND,
            unit="µs",
            settings={
                "model": f"3 x (Linear({WIDTH}, {WIDTH}), ReLU), Linear({WIDTH}, {CLASSES})",
                "batch": [BATCH, WIDTH],
                "optimizer": "AdamW(fused=True)",
                "threads": 1,
                "rounds": rounds,
                "seconds a sample": seconds,
                "clock": "process_time",
            },
            rows=[Row(name, timings.get(name), note) for name, note in notes.items()],
            goals=[
                Goal(f"{title}: {name} / {HAND}", limit, timings[name].ratio.median)
                for task_of_goal, name, limit in GOALS
                if task_of_goal == title
            ],
        )


def _verify(task: Task, name: str) -> str:
    """Train by hand and by this loop, and say how alike the weights are; AssertionError where they are not."""
    if missing := _missing(task, name):
        return missing
    if name == NO_UPDATE:
        return "what is left for all of them"
    start = _prepare(task, HAND, lr=1e-3)[0]
    expected, train_by_hand = _prepare(task, HAND, lr=1e-3)
    found, train = _prepare(task, name, lr=1e-3)
    for _ in range(5):
        train_by_hand()
        train()
    assert not any(map(torch.equal, expected, start)), "the training by hand left a weight as it was"
    if all(map(torch.equal, found, expected)):
        return "noise floor" if name == TWIN else "identical weights"
    tolerance = TOLERANCES.get(name)
    assert tolerance is not None, f"{name} does not train as the loop by hand does"
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)
    return f"weights within {tolerance:g}"


def _prepare(task: Task, name: str, *, lr: float) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """The weights of a model of its own, and a call that trains it on every batch once."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    weights = list(model.parameters())
    if name in MADE:
        optimizer = accelcore.select("cpu").optimizers.create("adamw", weights, lr=lr)
    else:
        optimizer = torch.optim.AdamW(weights, lr=lr, fused=True)
    batches: Batches = [(torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,))) for _ in range(BATCHES)]
    train = LOOPS[name](task, model, optimizer, batches)
    assert name != FLAT or len(optimizer.bound) == 1, "the trainer was to lay a tiny model flat"
    return weights, train


def _missing(task: Task, name: str) -> str:
    """Why a loop is not there; empty where it is."""
    if name == MMENGINE and task.precision != "fp32":
        return "its wrapper for mixed precision takes no CPU"
    return "not installed" if name in MODULES and find_spec(MODULES[name]) is None else ""
