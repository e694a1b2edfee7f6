"""One rank of a training that saves often: `killed_ranks.py RUN FOLDER BATCHES`. The subject of kills.py.

Each rank appends its losses to FOLDER/losses-RANK. FOLDER/final-RANK holds a digest of its final parameters.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import accelcore

TIMEOUT = timedelta(seconds=30)
"""A rank that was lost is noticed at once, but for one: the first, if it is lost before the ranks have met."""
HANGS = 100
"""Seconds after which a rank writes where it is."""
PER_EPOCH = 12
"""Micro-batches of a rank in an epoch."""


def trainer_of(accel, outputs, parallel):
    model = nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, outputs))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
    return accel.trainer(
        model,
        optimizer,
        loss=lambda model, batch: mse_loss(model(batch[0]), batch[1][:, :outputs]),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95),
        parallel=parallel,
        accumulate=2,
        clip_norm=1.0,
    )


class Log:
    """File of lines, each written in one call, so that a kill does not tear a line."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *values):
        os.write(self._file, (json.dumps(values) + "\n").encode())


def main(run, folder, batches):
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANGS)
    accel = accelcore.select("cpu")
    with accel.distributed(timeout=TIMEOUT) as job:
        accel.runtime.seed(1)
        if run == "together":
            first, second = trainer_of(accel, 2, "ddp"), trainer_of(accel, 1, "zero1")
            saved = accelcore.Together(first=first, second=second)
        else:
            first = saved = trainer_of(accel, 2, run)
            second = None
        inputs = torch.randn(PER_EPOCH * 8, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, torch.stack([inputs.prod(1), inputs.sum(1)], 1))
        loader = DataLoader(data, 4, shuffle=True)
        saved.resume(folder)
        log, number = Log(Path(folder, f"losses-{job.rank}")), saved.extra.get("batches", 0)
        while number < batches:
            for batch in first.batches(loader):
                losses = [first(batch).item()]
                if second is not None and number % 3:  # closes its windows at other times than the first
                    losses.append(second(batch).item())
                number += 1
                log.write(number, losses)
                if number % 3 == 0:  # every other time within a window
                    saved.save(folder, keep=2, extra={"batches": number})
        trained = [*first.model.parameters(), *(second.model.parameters() if second else ())]
        whole = [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach() for one in trained]
        digest = hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in whole)).hexdigest()
        Path(folder, f"final-{job.rank}").write_text(digest)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
