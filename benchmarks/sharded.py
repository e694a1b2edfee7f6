"""Steps of models that ranks divide, beside torch's fully_shard called by hand, and the memory that each rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accelcore
from accelcore import FSDP
from benchmarks.on_ranks import on_ranks
from benchmarks.paired import compare, sample
from benchmarks.rank_tasks import TASKS, Task, Training, loop, model_of, repeated, verify, with_trainer
from benchmarks.report import Goal, Row, Table

__all__ = ["GOAL", "run"]

RANKS = 2
GOAL = 1.02
DIVIDED = ("14M in 6 layers", "small GPT")
HAND, TWIN, OURS = "fully_shard by hand", "fully_shard by hand, again", "trainer: fsdp"
ZERO2, ZERO1, DDP, ALONE = "trainer: zero2", "trainer: zero1", "trainer: ddp", "no communication at all"
TOLERANCES = dict.fromkeys([TWIN, OURS, ZERO2, ZERO1, DDP], 1e-3)


def run(rounds: int, titles: tuple[str, ...] = DIVIDED) -> Iterator[Table]:
    """A table for each task."""
    return on_ranks(RANKS, _divided, rounds, titles)


def _divided(accel: accelcore.Backend, rank: int, rounds: int, titles: tuple[str, ...]) -> Iterator[Table]:
    for title in titles:
        yield _measure(accel, rank, title, TASKS[title], rounds)


def _measure(accel: accelcore.Backend, rank: int, title: str, task: Task, rounds: int) -> Table:
    torch.manual_seed(1 + rank)
    batch = task.batch()
    options: Mapping[str, Mapping[str, Any]] = {
        OURS: {"parallel": FSDP(wrap=_is_group)},
        ZERO2: {"parallel": FSDP(wrap=_is_group, reshard_after_forward=False)},
        ZERO1: {"parallel": "zero1"},
        DDP: {"parallel": "ddp"},
    }
    makers: dict[str, Callable[[float], Training]] = {
        HAND: lambda lr: _by_hand(task, batch, lr),
        TWIN: lambda lr: _by_hand(task, batch, lr),
        **{name: lambda lr, own=own: with_trainer(accel, task, batch, lr, **own) for name, own in options.items()},
        ALONE: lambda lr: _alone(task, batch, lr),
    }
    notes = {HAND: "", **verify(task, makers, HAND, TOLERANCES, ALONE), TWIN: "noise floor", ALONE: "the floor"}
    trainings = {name: make(0.0) for name, make in makers.items()}
    cases = {name: repeated(training.step, task.steps) for name, training in trainings.items()}
    timings = compare(sample(cases, rounds=rounds, per=task.steps, ready=dist.barrier), HAND)
    held = {name: _held(training) / 1e6 for name, training in trainings.items()}
    rows = [
        Row(name, timings[name], f"{held[name]:.1f} MB a rank; {notes[name]}".rstrip("; "), {"megabytes": held[name]})
        for name in cases
    ]
    return Table(
        title=f"{title}: one step of {RANKS} ranks that divide the model",
        base=HAND,
        unit="ms",
        settings={
            "groups": "each block or linear layer, and the model",
            "memory": "of parameters and moments, on rank 0, between steps",
            "optimizer": "AdamW(fused=True) by hand, adamw in trainers",
            "ranks": RANKS,
            "threads": 1,
            "process group": "gloo",
            "rounds": rounds,
            "steps a sample": task.steps,
            "clock": "perf_counter",
        },
        rows=rows,
        goals=[Goal(f"{title}: {OURS} / {HAND}", GOAL, timings[OURS].ratio.median)],
    )


def _by_hand(task: Task, batch: tuple[Tensor, ...], lr: float) -> Training:
    from torch.distributed.fsdp import fully_shard

    model = model_of(task)
    for module in [module for module in model.modules() if _is_group(module)]:
        fully_shard(module)
    fully_shard(model)
    return loop(model, model, batch, lr)


def _alone(task: Task, batch: tuple[Tensor, ...], lr: float) -> Training:
    model = model_of(task)
    return loop(model, model, batch, lr)


def _is_group(module: nn.Module) -> bool:
    """The blocks of a GPT, and large layers."""
    return type(module).__name__ == "Block" or (isinstance(module, nn.Linear) and module.in_features > 1024)


def _held(training: Training) -> int:
    """Bytes that a rank has of parameters and of the optimizer's state."""
    state = [value for entry in training.optimizer.state.values() for value in entry.values()]
    tensors = [value for value in (*training.model.parameters(), *state) if isinstance(value, Tensor)]
    return sum((value.to_local() if hasattr(value, "to_local") else value).nbytes for value in tensors)
