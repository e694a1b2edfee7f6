"""One rank of a job that records and replays a model which the ranks divide: `divided_ranks.py FOLDER`.

What it found goes to FOLDER/RANK.json: for each replay the fault, and the result's phase, step, rank, module and notes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import accelcore
from accelcore.parity.compare import compare


def train(accel, fault):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = nn.CrossEntropyLoss()
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, batch: loss(model(batch[0]), batch[1]), parallel="fsdp"
    )
    draw = torch.Generator().manual_seed(accel.collectives.rank)
    for step in range(1, 5):
        shard = optimizer.param_groups[0]["params"][2].to_local()  # the weight of the second layer
        if step == 3 and fault == "weights" and accel.collectives.rank == 1:
            with torch.no_grad():
                shard.add_(1e-3)
        trainer((torch.randn(8, 6, generator=draw), torch.randint(4, (8,), generator=draw)))


def main():
    folder = Path(sys.argv[1])
    accel, found = accelcore.select("cpu"), {}
    with accel.distributed() as job:
        with accelcore.Record(folder / "ref"):
            train(accel, "none")
        job.barrier()
        for fault in ("none", "weights"):
            with accelcore.Replay(folder / "ref", out=folder / fault):
                train(accel, fault)
            job.barrier()
            result = compare(folder / "ref", folder / fault)
            found[fault] = [result.agrees, result.phase, result.step, result.rank, result.module, list(result.notes)]
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
