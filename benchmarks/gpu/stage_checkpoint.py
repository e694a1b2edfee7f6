"""Saving and resuming GPT-2 124M with AdamW (1.5 GB), and whether a resume and a repetition give the same bits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT2_124M
from benchmarks.gpu.results import Case, Findings, Goal
from benchmarks.gpu.stage_gpt import TOY, make_work
from benchmarks.paired import compare, sample
from benchmarks.report import Row, Table, print_table

__all__ = ["run"]

BATCH, STEPS = 2, 3
HAND = "torch.save"


def run(device: Device, deadline: Deadline) -> Findings:
    """Seconds to save and to resume beside torch.save and torch.load, and the bits of three trainings."""
    # For all of this process: attention and the gradients of embeddings add in no fixed order otherwise.
    device.accel.runtime.seed(0, deterministic=True)
    trainer, batch = _trainer(device)
    for _ in range(STEPS):
        trainer(batch)
    with tempfile.TemporaryDirectory(prefix="accelcore-gpu-") as folder:
        state = Path(folder, "state.pt")

        def by_hand() -> None:
            torch.save({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}, state)

        save: dict[str, Callable[[], object]] = {
            HAND: by_hand,
            f"{HAND}, again": by_hand,
            "trainer.save": partial(trainer.save, folder),
        }
        rounds = 2 if device.toy else 4
        saved = compare(sample(save, rounds=rounds, clock=device.clock), HAND)

        def load_by_hand() -> None:
            torch.load(state, map_location=device.torch, weights_only=True)

        load: dict[str, Callable[[], object]] = {
            "torch.load": load_by_hand,
            "torch.load, again": load_by_hand,
            "trainer.resume": partial(trainer.resume, folder),
        }
        loaded = compare(sample(load, rounds=rounds, clock=device.clock), "torch.load")
        size = state.stat().st_size
        for _ in range(STEPS):
            trainer(batch)
        resumed = _weights(trainer)
        other, batch = _trainer(device)
        other.resume(folder)
        for _ in range(STEPS):
            other(batch)
    print_table(Table("save", HAND, "ms", {}, [Row(name, timing, "") for name, timing in saved.items()]))
    print_table(Table("resume", "torch.load", "ms", {}, [Row(name, timing, "") for name, timing in loaded.items()]))
    cases = [
        Case(title, name, timing, rounds, base, values={"bytes_per_second": size / timing.seconds.median})
        for title, base, timings in (("save", HAND, saved), ("resume", "torch.load", loaded))
        for name, timing in timings.items()
    ]
    first, second = (_repeat(device) for _ in range(2))
    goals = [
        Goal(
            "checkpoint: tensors that differ after a resume, deterministic=True",
            0,
            _differing(resumed, _weights(other)),
        ),
        Goal("checkpoint: tensors that differ in a repetition, deterministic=True", 0, _differing(first, second)),
    ]
    return Findings({"bytes": size, "batch": BATCH, "precision": "bf16"}, cases, goals)


def _trainer(device: Device) -> tuple[Any, tuple[Tensor, Tensor]]:
    work = make_work(device, TOY if device.toy else GPT2_124M, BATCH)
    optimizer = device.accel.optimizers.create("adamw", work.model.parameters(), lr=1e-4)
    return device.accel.trainer(work.model, optimizer, loss=work.loss, precision="bf16"), work.batches[0]


def _repeat(device: Device) -> list[Tensor]:
    trainer, batch = _trainer(device)
    for _ in range(STEPS):
        trainer(batch)
    return _weights(trainer)


def _weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def _differing(first: list[Tensor], second: list[Tensor]) -> float:
    return float(sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True)))
