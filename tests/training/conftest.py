"""What several files of tests of training have in common: a run with everything random in it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Random augmentation from every generator a data set might use."""

    def __init__(self, size: int = 22) -> None:
        self.inputs = torch.randn(size, 5, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(5) * 0.1 + random.random() * 0.1 + np.random.random() * 0.1
        return self.inputs[index] + noise, self.inputs[index].sum(0, keepdim=True)


@pytest.fixture
def noisy():
    """A data set with random augmentation."""
    return Noisy


@pytest.fixture
def build():
    """Makes a trainer and its loader."""
    return _build


@pytest.fixture
def run():
    """Trains, saves at a moment if asked to, and returns the losses."""
    return _run


@pytest.fixture
def final():
    """The state of a trainer's model, copied."""
    return _final


def _build(accel, *, precision="fp32", accumulate=1, optimizer="adamw", workers=0, generator=None, **options):
    accel.runtime.seed(5)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = accel.optimizers.create(optimizer, model.parameters(), lr=1e-2, **options)
    trainer = accel.trainer(
        model,
        optimizer,
        loss=lambda m, batch: mse_loss(m(batch[0]), batch[1]),
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100, cycle_momentum=False),
        precision=precision,
        accumulate=accumulate,
        clip_norm=1.0,
    )
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers, generator=generator)
    return trainer, loader


def _run(trainer, loader, epochs=3, save_after=None, folder=None):
    """Train; the loss of each micro-batch. Stops once it has saved after `save_after` of them."""
    losses = []
    for _ in range(trainer.epoch, epochs):
        for batch in trainer.batches(loader):
            losses.append(trainer(batch).item())
            if len(losses) == save_after:
                trainer.save(folder)
                return losses
    return losses


def _final(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}
