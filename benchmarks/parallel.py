"""What a training step of two ranks costs beside torch's DistributedDataParallel, written by hand.

Two processes of one thread each, which meet over gloo on this host. Both run the same cases in the same order, and
meet before each sample, so that none is charged for the other's lag; times are those that pass on rank 0. Before
anything is timed, every case must have made of the same weights what the loop by hand makes of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accelcore
from benchmarks.gpu.gpt import GPT, Shape
from benchmarks.paired import compare, sample
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
CHECKED = 3
"""Steps to compare weights after."""
# How far they may be from those by hand, relative to how far they have come: a last bit, or what bf16 rounds.
TOLERANCES = {**dict.fromkeys([TWIN, COMBINE, TENSORS, DDP], 1e-3), BF16: 0.1}


@dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
        model: makes the model, a module that returns its loss.
        batch: makes a batch.
        steps: how many make a sample.
        goal: what combine_ddp may take of the time by hand.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    steps: int
    goal: float


class Square(nn.Module):
    """The mean square of what layers return."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).square().mean()


def _small() -> nn.Module:
    return Square([layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.LayerNorm(32))])


def _big() -> nn.Module:
    return Square([nn.Linear(1536, 1536) for _ in range(6)])


SMALL_GPT = Shape(layers=4, heads=4, width=256, context=64, vocabulary=512)


def _gpt() -> nn.Module:
    return GPT(SMALL_GPT)


def _tokens() -> tuple[Tensor, ...]:
    tokens = torch.randint(SMALL_GPT.vocabulary, (4, SMALL_GPT.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TASKS = {
    "400 small tensors": Task(_small, lambda: (torch.randn(8, 32),), 4, 0.80),
    "14M in 6 layers": Task(_big, lambda: (torch.randn(4, 1536),), 1, 1.0),
    "small GPT": Task(_gpt, _tokens, 1, 1.0),
}


def run(quick: bool) -> Iterator[Table]:
    """A table for each task; combine_ddp has a goal in all of them."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found, sent = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank, args=(rank, f"file://{folder}/ranks", quick, sent), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        sent.close()  # so that the end of both ranks is the end of what they send
        try:
            for _ in TASKS:
                yield found.recv()
        except EOFError:
            raise RuntimeError("a rank has failed; its error is above") from None
        finally:
            for process in ranks:
                process.join(timeout=60)


def _rank(rank: int, meeting: str, quick: bool, found: Connection) -> None:
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    with accel.distributed(rank=rank, world_size=RANKS, init_method=meeting):
        for title, task in TASKS.items():
            table = _measure(accel, rank, title, task, 15 if quick else 60)
            if rank == 0:
                found.send(table)
    found.close()


def _measure(accel: accelcore.Backend, rank: int, title: str, task: Task, rounds: int) -> Table:
    torch.manual_seed(1 + rank)
    batch = task.batch()
    bucket = _best_bucket(task, batch, rounds)
    makers: dict[str, Callable[[float], _Training]] = {
        HAND: lambda lr: _by_hand(task, batch, bucket, lr),
        TWIN: lambda lr: _by_hand(task, batch, bucket, lr),
        **{name: lambda lr, own=own: _with_trainer(accel, task, batch, lr, **own) for name, own in TRAINERS.items()},
        ALONE: lambda lr: _alone(task, batch, lr),
    }
    notes = _verify(task, makers)
    cases = {name: _repeated(make(0.0).step, task.steps) for name, make in makers.items()}
    assert torch.get_num_threads() == 1, "somebody has changed the number of threads"
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


@dataclass(frozen=True)
class _Training:
    weights: list[nn.Parameter]
    step: Callable[[], object]


def _by_hand(task: Task, batch: tuple[Tensor, ...], bucket: int, lr: float) -> _Training:
    model = _model(task)
    weights = list(model.parameters())
    replica = DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket, forward_sync_buffers=False
    )
    return _loop(weights, replica, batch, lr)


def _alone(task: Task, batch: tuple[Tensor, ...], lr: float) -> _Training:
    model = _model(task)
    return _loop(list(model.parameters()), model, batch, lr)


def _loop(weights: list[nn.Parameter], model: nn.Module, batch: tuple[Tensor, ...], lr: float) -> _Training:
    optimizer = torch.optim.AdamW(weights, lr=lr, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    return _Training(weights, step)


def _with_trainer(
    accel: accelcore.Backend, task: Task, batch: tuple[Tensor, ...], lr: float, **options: Any
) -> _Training:
    model = _model(task)
    weights = list(model.parameters())
    trainer = accel.trainer(model, accel.optimizers.create("adamw", weights, lr=lr), **options)
    return _Training(weights, lambda: trainer(batch))


def _model(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return task.model()


def _best_bucket(task: Task, batch: tuple[Tensor, ...], rounds: int) -> int:
    """The size with which the loop by hand is fastest: rank 0's finding, for both."""
    cases = {str(size): _repeated(_by_hand(task, batch, size, 0.0).step, task.steps) for size in BUCKETS}
    timings = compare(sample(cases, rounds=max(5, rounds // 4), ready=dist.barrier), str(BUCKETS[0]))
    best = torch.tensor(min(BUCKETS, key=lambda size: timings[str(size)].ratio.median))
    dist.broadcast(best, 0)
    return int(best)


def _verify(task: Task, makers: Mapping[str, Callable[[float], _Training]]) -> dict[str, str]:
    """Train with each, and say how alike the weights are; AssertionError where they are not."""
    start = _joined(_model(task).parameters())
    ends = {name: _trained(make(1e-3)) for name, make in makers.items()}
    way = (ends[HAND] - start).norm()
    notes = {HAND: ""}
    for name, end in ends.items():
        away = float((end - ends[HAND]).norm() / way)
        if name in TOLERANCES:
            assert away <= TOLERANCES[name], f"{name} is {away:.1e} of the way from the weights by hand"
            notes[name] = "identical weights" if away == 0 else f"weights {away:.0e} of the way apart"
    # Else ranks had the same data, and a case that exchanges nothing would have passed, too.
    assert float((ends[ALONE] - ends[HAND]).norm() / way) > 2 * max(TOLERANCES.values())
    return {**notes, TWIN: "noise floor", ALONE: "the floor; every rank has weights of its own"}


def _trained(training: _Training) -> Tensor:
    for _ in range(CHECKED):
        training.step()
    return _joined(training.weights)


def _joined(weights: Any) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in weights])


def _repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(times):
            step()

    return repeat
