"""A training run that can be told to die of SIGKILL: the subject of test_resume.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelcore


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)

    accel = accelcore.select("cpu")
    accel.runtime.seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    trainer = accel.trainer(
        model,
        accel.optimizers.create("adamw", model.parameters(), lr=1e-2),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    )
    inputs = torch.randn(32, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.prod(1, keepdim=True)), 4, shuffle=True, num_workers=2)
    trainer.resume(args.folder)
    with (args.folder / "losses.jsonl").open("a") as log:
        for _ in range(trainer.epoch, 3):
            for batch in trainer.batches(loader):
                loss = trainer(batch).item()
                log.write(json.dumps({"batch": trainer.steps, "loss": loss}) + "\n")
                log.flush()
                if trainer.steps % 3 == 0:
                    trainer.save(args.folder, keep=2)
                if trainer.steps == args.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
