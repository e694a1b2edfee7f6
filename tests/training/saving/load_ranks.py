"""One rank of a job of two that begins with the checkpoint of one process: for test_load.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import accelcore


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    accel = accelcore.select("cpu")
    data = list(torch.load(folder / "data.pt"))

    def make(**options):
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
        return accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean(), **options)

    with accel.distributed() as job:
        for parallel in ("ddp", "zero1", "fsdp"):
            trainer = make(parallel=parallel, scheduler="cosine")
            trainer.load(folder / "one", optimizer=True)
            found[parallel] = []
            for _ in trainer.epochs(1):
                for rows in trainer.batches(data):
                    found[parallel].append(trainer(rows).item())
                    if trainer.steps == 4:
                        trainer.save(folder / parallel)
            low = make(parallel=parallel, precision=accelcore.Policy(model_dtype="bfloat16"))
            low.load(folder / "one", optimizer=True)
            low.save(folder / f"low-{parallel}")
    torch.save(found, folder / f"{job.rank}.pt")


main()
