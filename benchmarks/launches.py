"""What a step costs on an Ascend NPU without one: operators launched and waits of the host, counted. EMULATED.

The real torch_npu runs on an emulated CANN, which counts. Counts depend neither on the machine nor on its load; they
are no times. The peer is the loop that one writes by hand with torch_npu: its NpuFusedAdamW, its GradScaler, its fused
clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import accelcore_npu_emulator as emulator

emulator.activate()  # before torch, which would look for a CANN

import torch
import torch_npu
from accelcore_npu_emulator import counters
from torch import nn

import accelcore
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-npu", "torch", "torch-npu")
LIMIT = 1.0
WARM_UP, STEPS = 4, 5
WIDTH, ROWS = 8, 4
# Name: precision, and the largest norm of the gradients.
TASKS: dict[str, tuple[str, float | None]] = {
    "fp32": ("fp32", None),
    "fp32, clipped": ("fp32", 1.0),
    "bf16": ("bf16", None),
    "fp16, dynamic loss scale": ("fp16", None),
    "fp16, dynamic loss scale, clipped": ("fp16", 1.0),
}
Step = Callable[[Any], object]


def run(quick: bool) -> Iterator[Table]:
    """A table for 20 parameters, and one for 200."""
    for parameters in (20, 200):
        rows, goals = [], []
        for task, (precision, clip) in TASKS.items():
            by_hand = _count(_by_hand, parameters, precision, clip)
            ours = _count(_trainer, parameters, precision, clip)
            rows += [Row(f"{task}: by hand", None, counts=by_hand), Row(f"{task}: trainer", None, counts=ours)]
            goals += [
                Goal(f"{what} of the trainer / by hand, {task}", LIMIT, _ratio(ours[what], by_hand[what]))
                for what in by_hand
            ]
        yield Table(
            title=f"EMULATED: a training step of {parameters} parameters on an NPU",
            base="by hand",
            unit="launches",
            settings={"width": WIDTH, "rows": ROWS, "warm_up": WARM_UP, "steps": STEPS, "soc": "Ascend910B2"},
            rows=rows,
            goals=goals,
        )


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else (1.0 if ours == 0 else float("inf"))


def _count(make: Callable[..., Step], parameters: int, precision: str, clip: float | None) -> dict[str, float]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)]
    step = make(nn.Sequential(*layers), precision, clip)
    batch = torch.ones(ROWS, WIDTH, device="npu:0")
    for _ in range(WARM_UP):
        step(batch)
    with counters.count() as cost:
        for _ in range(STEPS):
            step(batch)
    return {
        "launches": cost.launches.total() / STEPS,
        "synchronizations": cost.synchronizations.total() / STEPS,
    }


def _trainer(model: nn.Module, precision: str, clip: float | None) -> Step:
    accel = accelcore.select("npu:0")
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-3)
    return accel.trainer(
        model,
        optimizer,
        loss=lambda model, batch: model(batch).square().mean(),
        precision=precision,
        clip_norm=clip,
        on_nonfinite=None,  # the loop by hand looks for no NaN either
    )


def _by_hand(model: nn.Module, precision: str, clip: float | None) -> Step:
    model.to("npu:0")
    optimizer = torch_npu.optim.NpuFusedAdamW(model.parameters(), lr=1e-3)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch_npu.npu.amp.GradScaler() if precision == "fp16" else None

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("npu", dtype, enabled=dtype is not None):
            loss = model(batch).square().mean()
        if scaler is None:
            loss.backward()
            if clip is not None:
                optimizer.clip_grad_norm_fused_(clip)
            optimizer.step()
            return
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_fused_(clip)
        scaler.step(optimizer)
        scaler.update()

    return step
