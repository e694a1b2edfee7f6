"""A training whose ranks are killed, one after each start, at a moment that chance chooses: for test_restarts.py.

Arguments: a folder; how many starts end so; how many are planned for, which decides the number of epochs; the strategy.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelcore

STEPS = 8  # within which a start meets its end


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    accel = accelcore.select("cpu")
    with accel.distributed() as job:
        accel.runtime.seed(job.rank)
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        trainer = accel.trainer(
            model,
            accel.optimizers.create("adamw", model.parameters(), lr=1e-2),
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            parallel=sys.argv[4],
        )
        rows = torch.randn(4 * 4 * job.world_size, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(rows, rows.prod(1, keepdim=True)), 4, shuffle=True)  # four steps an epoch
        trainer.resume(folder / "checkpoints")
        chance = random.Random(start)
        dies = start < kills and chance.randrange(job.world_size) == job.rank
        last, delay = trainer.steps + chance.randrange(STEPS - 1), chance.random() / 50
        with (folder / f"losses-{job.rank}").open("a") as log:
            for _ in trainer.epochs(2 * int(sys.argv[3]) + 2):
                for batch in trainer.batches(loader):
                    if dies and trainer.steps == last:  # within this step, or the saving after it
                        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                    elif dies and trainer.steps > last:
                        signal.pause()
                    loss = trainer(batch).item()
                    log.write(json.dumps([trainer.steps, loss]) + "\n")
                    log.flush()
                    if trainer.steps % 3 == 0:
                        trainer.save(folder / "checkpoints", keep=2)
        (folder / f"starts-{job.rank}").write_text(str(start))


if __name__ == "__main__":
    main()
