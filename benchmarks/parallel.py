"""What a training step of several ranks costs beside torch's engines, called by hand, and what a save of theirs costs.

All ranks run the same cases in the same order, and meet before each sample, so that none is charged for another's lag;
times are those that pass on rank 0. Before a step is timed, every case must have made of the same weights what the loop
by hand makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import accelcore
from benchmarks import saving, sharded
from benchmarks.on_ranks import on_ranks
from benchmarks.paired import compare, sample
from benchmarks.rank_tasks import TASKS, Task, Training, loop, model_of, repeated, verify, with_trainer
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch")
RANKS = 2
BUCKETS = (1, 4, 25, 100)
"""Megabytes. The loop by hand has the size with which it is fastest here."""

HAND, TWIN, COMBINE = "DDP by hand", "DDP by hand, again", "trainer: combine_ddp"
TENSORS, BF16, DDP = "trainer: combine_ddp, flat=False", "trainer: combine_ddp, comm_dtype bf16", "trainer: ddp"
ALONE = "no communication at all"
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    COMBINE: {"parallel": "combine_ddp"},
    TENSORS: {"parallel": "combine_ddp", "flat": False},
    BF16: {"parallel": "combine_ddp", "comm_dtype": "bfloat16"},
    DDP: {"parallel": "ddp"},
}
# How far they may be from those by hand, relative to how far they have come: a last bit, or what bf16 rounds.
TOLERANCES = {**dict.fromkeys([TWIN, COMBINE, TENSORS, DDP], 1e-3), BF16: 0.1}


def run(quick: bool) -> Iterator[Table]:
    """A table for each task under DDP, then for two of them under fully_shard, and one of saving."""
    rounds = 15 if quick else 60
    return chain(on_ranks(RANKS, _replicated, rounds), sharded.run(rounds), saving.run(64 if quick else 1024))


def _replicated(accel: accelcore.Backend, rank: int, rounds: int) -> Iterator[Table]:
    for title, task in TASKS.items():
        yield _measure(accel, rank, title, task, rounds)


def _measure(accel: accelcore.Backend, rank: int, title: str, task: Task, rounds: int) -> Table:
    torch.manual_seed(1 + rank)
    batch = task.batch()
    bucket = _best_bucket(task, batch, rounds)
    makers: dict[str, Callable[[float], Training]] = {
        HAND: lambda lr: _by_hand(task, batch, bucket, lr),
        TWIN: lambda lr: _by_hand(task, batch, bucket, lr),
        **{name: lambda lr, own=own: with_trainer(accel, task, batch, lr, **own) for name, own in TRAINERS.items()},
        ALONE: lambda lr: _alone(task, batch, lr),
    }
    found = verify(task, makers, HAND, TOLERANCES, ALONE)
    notes = {HAND: "", **found, TWIN: "noise floor", ALONE: "the floor; every rank has weights of its own"}
    cases = {name: repeated(make(0.0).step, task.steps) for name, make in makers.items()}
    timings = compare(sample(cases, rounds=rounds, per=task.steps, ready=dist.barrier), HAND)
    weights = list(task.model().parameters())
    return Table(
        title=f"{title}: one step of {RANKS} ranks",
        base=HAND,
        unit="ms",
        settings={
            "parameters": len(weights),
            "elements": sum(weight.numel() for weight in weights),
            "optimizer": "AdamW(fused=True) by hand, adamw in trainers",
            "by hand": f"gradient_as_bucket_view, static_graph, buckets of {bucket} MB, no broadcast of buffers",
            "ranks": RANKS,
            "threads": 1,
            "process group": "gloo",
            "rounds": rounds,
            "steps a sample": task.steps,
            "clock": "perf_counter",
        },
        rows=[Row(name, timings[name], notes[name]) for name in cases],
        goals=[Goal(f"{title}: {COMBINE} / {HAND}", task.goal, timings[COMBINE].ratio.median)],
    )


def _by_hand(task: Task, batch: tuple[Tensor, ...], bucket: int, lr: float) -> Training:
    model = model_of(task)
    replica = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket, forward_sync_buffers=False
    )
    return loop(model, replica, batch, lr)


def _alone(task: Task, batch: tuple[Tensor, ...], lr: float) -> Training:
    model = model_of(task)
    return loop(model, model, batch, lr)


def _best_bucket(task: Task, batch: tuple[Tensor, ...], rounds: int) -> int:
    """The size with which the loop by hand is fastest: rank 0's finding, for both."""
    cases = {str(size): repeated(_by_hand(task, batch, size, 0.0).step, task.steps) for size in BUCKETS}
    timings = compare(sample(cases, rounds=max(5, rounds // 4), ready=dist.barrier), str(BUCKETS[0]))
    best = torch.tensor(min(BUCKETS, key=lambda size: timings[str(size)].ratio.median))
    dist.broadcast(best, 0)
    return int(best)
