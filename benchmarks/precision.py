"""What precision costs and gains on the CPU: how fast products are, whole steps in every precision, loss scaling.

Processors differ: how much faster bf16 is than fp32 here, and fp32 by oneDNN than by torch's usual library, is measured
in the same run, and goals are shares of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import process_time
from typing import Any

import torch
from torch import nn

import accelcore
from accelcore import Policy
from benchmarks.convergence import converge
from benchmarks.paired import Timing, compare, sample
from benchmarks.precision_models import HAND_BF16, LR, TASKS, by_hand
from benchmarks.report import Goal, Row, Table
from benchmarks.torch_alone import TorchAlone

__all__ = ["CEILINGS", "DISTRIBUTIONS", "EXACT", "FAST", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch")
SIZE = 1024
TENSORS = 1000
CEILINGS = f"Square products of {SIZE}"
EXACT, TWIN, FAST, BF16 = "fp32 ieee", "fp32 ieee, again", "fp32 fast", "bf16"
FP16, O1, O2 = "fp16", "O1 in bf16", "O2 in bf16"
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    EXACT: {"fp32": "ieee"},
    TWIN: {"fp32": "ieee"},
    FAST: {"fp32": "fast"},
    BF16: {"precision": "bf16"},
    FP16: {"precision": "fp16"},
    O1: {"precision": Policy.preset("O1", dtype="bfloat16")},
    O2: {"precision": Policy.preset("O2", dtype="bfloat16")},
}
# Time by time: at most this much of the other's.
GPT_OF_HAND, RESNET_OF_HAND, O1_OF_HAND, FP16_OF_FP32 = 1 / 1.15, 1.0, 1.05, 1 / 0.9
BF16_SHARE, FAST_SHARE, NOISE = 0.7, 0.75, 1.02
SCALED, UNSCALED = 1.35, 1 / 2.5


def run(quick: bool) -> Iterator[Table]:
    """The ceilings, a table for each model, two of loss scaling, and what each precision learns."""
    torch.set_num_threads(1)
    accel = accelcore.select("cpu")
    ceilings = _ceilings(accel, 3 if quick else 15)
    yield ceilings
    times = {row.case: row.timing.ratio.median for row in ceilings.rows if row.timing is not None}
    for number, task in enumerate(TASKS):
        yield _steps(accel, task, times, rounds=2 if quick else 9, is_gpt=not number)
    yield _scaled(accel, 5 if quick else 60)
    yield _unscaled(accel, 5 if quick else 60)
    yield from converge(accel, quick)


def _ceilings(accel: accelcore.Backend, rounds: int) -> Table:
    """How fast this machine multiplies, which nothing built of products can beat."""
    factors = {dtype: torch.randn(SIZE, SIZE).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    accel.precision.prepare(torch.float16)

    def multiply(dtype: torch.dtype, mode: str) -> Callable[[], None]:
        def run() -> None:
            with accel.precision.fp32(mode):
                torch.mm(factors[dtype], factors[dtype])

        return run

    cases = {
        EXACT: multiply(torch.float32, "ieee"),
        TWIN: multiply(torch.float32, "ieee"),
        FAST: multiply(torch.float32, "fast"),
        BF16: multiply(torch.bfloat16, "ieee"),
        FP16: multiply(torch.float16, "ieee"),
    }
    timings = _compare(cases, EXACT, rounds, seconds=0.05)
    rows = [Row(case, it, f"{2 * SIZE**3 / it.seconds.median / 1e9:.0f} GF/s") for case, it in timings.items()]
    return Table(CEILINGS, EXACT, "ms", _settings(rounds, fast=accel.capabilities.fast_fp32), rows)


def _steps(
    accel: accelcore.Backend, task: str, ceilings: Mapping[str, float], *, rounds: int, is_gpt: bool
) -> Table:  # fmt: skip
    """Whole training steps with AdamW; torch by itself has a process of its own."""
    with TorchAlone(by_hand, task) as alone:
        cases = {**{name: _training(accel, task, options) for name, options in TRAINERS.items()}, **alone.cases}
        samples = sample(cases, rounds=rounds, clock=alone.clock)
    timings, of_hand = compare(samples, EXACT), compare(samples, HAND_BF16)
    to_exact = {name: it.ratio.median for name, it in timings.items()}
    goals = [
        Goal(f"{task}: {FAST} / {EXACT}", NOISE, to_exact[FAST]),
        Goal(f"{task}: {FP16} / {EXACT}", FP16_OF_FP32, to_exact[FP16]),
        Goal(f"{task}: {O1} / {HAND_BF16}", O1_OF_HAND, of_hand[O1].ratio.median),
        Goal(f"{task}: {BF16} / {HAND_BF16}", GPT_OF_HAND if is_gpt else RESNET_OF_HAND, of_hand[BF16].ratio.median),
    ]
    if is_gpt:
        for name, share in ((BF16, BF16_SHARE), (FAST, FAST_SHARE)):
            found = to_exact[name] / ceilings[name]
            goals.append(Goal(f"{task}: {name} / {EXACT}, to that of a product", 1 / share, found))
    notes = {name: f"{1 / to_exact[name]:.2f} times as fast" for name in to_exact}
    settings = _settings(rounds, optimizer="adamw", clock="processor time")
    return Table(f"{task}: one step", EXACT, "ms", settings, [Row(n, it, notes[n]) for n, it in timings.items()], goals)


def _training(accel: accelcore.Backend, task: str, options: Mapping[str, Any]) -> Callable[[], object]:
    model, batch = TASKS[task]()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR)
    trainer = accel.trainer(model, optimizer, **options)
    return lambda: trainer(batch)


def _scaled(accel: accelcore.Backend, rounds: int) -> Table:
    """A step of many small layers in flat memory, with a dynamic loss scale and without."""
    width, layers, rows = 64, 200, 8
    batch = torch.randn(rows, width)

    def training(scale: str | None) -> Callable[[], object]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR)
        trainer = accel.trainer(
            model, optimizer, loss=lambda m, x: m(x).square().mean(), loss_scale=scale, flat=True
        )  # fmt: skip
        return lambda: trainer(batch)

    plain, scaled = "no loss scale", "dynamic loss scale"
    timings = _compare({plain: training(None), f"{plain}, again": training(None), scaled: training("dynamic")},
                       plain, rounds, seconds=0.02)  # fmt: skip
    return Table(
        f"A step of {layers} layers of {width}, flat", plain, "ms", _settings(rounds),
        [Row(*pair) for pair in timings.items()],
        [Goal("a step with a loss scale / without", SCALED, timings[scaled].ratio.median)],
    )  # fmt: skip


def _unscaled(accel: accelcore.Backend, rounds: int) -> Table:
    """Dividing gradients by the scale and looking for an overflow."""
    shapes = [(128, 128), (128,), (64, 256), (256,), (96, 96), (96,)]
    parameters = [nn.Parameter(torch.randn(shapes[n % len(shapes)])) for n in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    torchs, ours = torch.amp.GradScaler("cpu", init_scale=1.0), accel.scaler.create(init=1.0)
    torchs.scale(torch.ones(()))
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])

    def by_torch() -> None:
        torchs.unscale_(optimizer)
        torchs.update()

    def by_ours(gradients: list[torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            ours.unscale_(optimizer, gradients)
            ours.abandon()

        return run

    base, lying = f"torch's GradScaler, {TENSORS} tensors", "accelcore, the same in flat memory"
    each: list[Any] = [parameter.grad for parameter in parameters]
    cases = {
        base: by_torch,
        f"{base}, again": by_torch,
        lying: by_ours([flat]),
        "accelcore, tensor by tensor": by_ours(each),
    }
    timings = _compare(cases, base, rounds, seconds=0.01)
    settings = _settings(rounds, elements=flat.numel(), tensors=TENSORS)
    goals = [Goal(f"unscale and check, {lying} / {base}", UNSCALED, timings[lying].ratio.median)]
    return Table("Unscale and check", base, "ms", settings, [Row(*pair) for pair in timings.items()], goals)


def _compare(
    cases: Mapping[str, Callable[[], object]], base: str, rounds: int, *, seconds: float
) -> Mapping[str, Timing]:
    return compare(sample(cases, rounds=rounds, seconds=seconds, clock=process_time), base)


def _settings(rounds: int, **others: object) -> dict[str, object]:
    return {"threads": 1, "rounds": rounds, **others}
