"""One rank of a job that loses another, in a way that the argument names: for test_missing_ranks.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import accelcore


def loads(rank: int, step: int) -> torch.Tensor:
    """A batch; in its third step rank 1 has a problem with its data."""
    if rank == 1 and step == 3:
        if sys.argv[1].startswith("waits"):
            threading.Event().wait()
        if sys.argv[1] == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1].startswith("fails"):
            raise ValueError("a row is bad")
    return torch.ones(2, 3)


def main() -> None:
    dist.set_debug_level_from_env()  # torch reads it when it is loaded, which in a fork was before it was set
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=timedelta(seconds=5)) as job:
        model = nn.Linear(3, 1)
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
        trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).sum(), parallel="combine_ddp")
        steps = 2 if sys.argv[1] == "stops early" and job.rank == 1 else 4
        for step in range(1, steps + 1):
            rows = loads(job.rank, step)
            try:
                trainer(rows)
            except RuntimeError as error:
                if sys.argv[1] == "waits, and is asked again":
                    break
                if sys.argv[1] == "fails, and that is wrapped":
                    raise KeyError("the step") from error
                raise
        if sys.argv[1] == "waits, and is asked again":
            job.all_reduce(torch.ones(1))
        if sys.argv[1] == "saves alone" and job.rank == 0:
            trainer.save(sys.argv[2])
        if sys.argv[1] == "another collective":
            tensor = torch.ones(3)
            accel.collectives.broadcast(tensor) if job.rank else accel.collectives.all_reduce(tensor)
        if sys.argv[1] == "another shape":
            accel.collectives.all_reduce(torch.ones(3 + job.rank))


if __name__ == "__main__":
    main()
