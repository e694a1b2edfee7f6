"""One rank of a job of two, on rank 1 of which a checkpoint cannot be restored: for test_resume_given_up.py."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import accelcore


def broken(*_):
    raise RuntimeError("only here")


BREAK = {
    "schedule": lambda trainer: setattr(trainer.scheduler, "load_state_dict", broken),
    "optimizer": lambda trainer: trainer.optimizer.register_load_state_dict_post_hook(broken),
    "scaler": lambda trainer: setattr(trainer.scaler, "takes", broken),
}


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=timedelta(seconds=60)) as job:
        for what, breaks in BREAK.items():
            for parallel in ("ddp", "fsdp"):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
                trainer = accel.trainer(
                    model, optimizer, loss=lambda m, b: m(b).square().mean(), scheduler=schedule, parallel=parallel
                )
                batch = torch.full((2, 3), 1.0 + job.rank)
                trainer(batch)
                trainer.save(folder / what / parallel)
                trainer(batch)
                before = json.dumps(plain(trainer))
                if job.rank == 1:
                    breaks(trainer)
                found[f"{what}, {parallel}"] = {
                    "raised": raised(lambda: trainer.resume(folder / what / parallel)),  # noqa: B023
                    "unchanged": json.dumps(plain(trainer)) == before,
                    "then": raised(lambda: trainer(batch)),  # noqa: B023
                }
        (folder / f"{job.rank}.json").write_text(json.dumps(found))


def plain(trainer):
    optimizer = trainer.optimizer.state_dict()
    return {
        "model": [whole(value) for value in trainer.model.state_dict().values()],
        "moments": [[whole(value) for value in entry.values()] for entry in optimizer["state"].values()],
        "rate": [group["lr"] for group in optimizer["param_groups"]],
        "schedule": trainer.scheduler.last_epoch,
    }


def whole(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()


def raised(function):
    try:
        function()
    except accelcore.AccelError as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    main()
