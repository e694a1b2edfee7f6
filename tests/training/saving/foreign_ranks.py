"""One rank of a job of two that loads a file of another program: for test_foreign.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore.optim.shards import is_sharded


def whole(value):
    return value.full_tensor() if is_sharded(value) else value


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        for parallel in ("fsdp", "zero1", "ddp"):
            for ours in (True, False):
                model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
                make = accel.optimizers.fastest if ours else lambda made: made
                optimizer = make(torch.optim.AdamW(model.parameters(), lr=0.5))
                trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean(), parallel=parallel)
                rest = trainer.load(folder / "file.pt")
                trainer(torch.load(folder / "rows.pt"))
                found[parallel, ours] = rest, {name: whole(value) for name, value in model.state_dict().items()}
    torch.save(found, folder / f"{job.rank}.pt")


main()
