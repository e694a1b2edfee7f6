"""One rank of a job in which rank 1 has a bad batch, and others run a backward pass beside the trainer.

`nonfinite_ranks.py FOLDER` writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from torch import nn

import accelcore

STRATEGIES = ("ddp", "combine_ddp", "zero1", "fsdp")
BAD = 3
"""The step of the bad batch."""


def make(accel, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
    return accel.trainer(model, optimizer, loss=lambda m, rows: m(rows).square().mean(), **options)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.full((2, 4), math.nan if (rank, step) == (1, BAD) else float(step + rank))


def beside(accel, **options) -> str:
    """Call `loss.backward()` before a window, which drops its gradients, then in one; return the error."""
    trainer, other = make(accel, **options), make(accel, **options)
    rows = batch(0, 1)
    for each in (trainer, other):
        each(rows)
    trainer.model(rows).sum().backward()
    for each in (trainer, other):
        each(rows)
    if not all(map(torch.equal, map(whole, trainer.model.parameters()), map(whole, other.model.parameters()))):
        return "gradients before a window count"
    trainer.backward(trainer.forward(rows).square().mean())
    trainer.model(rows).sum().backward()
    try:
        trainer.update()
    except accelcore.TrainingError as error:
        return str(error)
    return ""


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def main(folder: Path) -> None:
    accel, found = accelcore.select("cpu"), {}
    with accel.distributed() as job:
        for parallel in STRATEGIES:
            trainer, raised, unsaved = make(accel, parallel=parallel), "", False
            try:
                for step in range(1, 21):
                    trainer(batch(job.rank, step))
            except accelcore.TrainingError as error:
                raised = str(error)
            try:
                trainer.save(folder / parallel)
            except (accelcore.TrainingError, accelcore.CheckpointError):
                unsaved = True
            skipping = make(accel, parallel=parallel, on_nonfinite="skip")
            for step in range(1, 6):
                skipping(batch(job.rank, step))
            found[parallel] = {
                "steps": trainer.steps,
                "raised": raised,
                "unsaved": unsaved,
                "skipped": skipping.skipped,
                "beside": beside(accel, parallel=parallel),
            }
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
