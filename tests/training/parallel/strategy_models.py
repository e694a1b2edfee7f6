"""What the ranks of strategy_ranks.py train, and the oracles in test_strategies.py: models, batches and losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

LR, DECAY = 0.1, 0.5


class Net(nn.Module):
    """Parts that can be left out of a pass, a normalization with buffers, tied weights, and a part nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.5)
        self.sometimes = nn.Linear(6, 6)
        self.outward = nn.Linear(6, 4)
        self.outward.weight = nn.Parameter(self.outward.weight.detach().clone())
        self.tied = nn.Linear(6, 4, bias=False)
        self.tied.weight = self.outward.weight
        self.never = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inward(rows)))
        if use:
            hidden = hidden + self.sometimes(hidden)
        return self.outward(hidden) + self.tied(hidden)


def batch(rank: int, number: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1000 * rank + number))


def loss_of(model, batch):
    rows, use = batch
    return mse_loss(model(rows, use), rows.flip(1))


def used(rank: int, number: int) -> bool:
    """Rank 0 always uses all, rank 1 in every third micro-batch."""
    return rank == 0 or number % 3 == 0


class Normed(nn.Module):
    """What apex's levels hold in different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inward = nn.Linear(4, 16, bias=False)  # before a norm, a bias has gradients of rounding alone
        self.norm, self.outward = nn.BatchNorm1d(16, momentum=0.5), nn.Linear(16, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.outward(torch.relu(self.norm(self.inward(rows))))


LEVELS = ("O2", "O3")


def loss_at_level(model, rows):
    return mse_loss(model(rows).float(), rows.float().flip(1))


class Waves(nn.Module):
    """Complex parameters, of which some can be left out of a pass."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("always", "never", "sometimes"):
            self.register_parameter(name, nn.Parameter(torch.full((3,), 1 + 2j)))

    def forward(self, rows: torch.Tensor, use: bool) -> torch.Tensor:
        return (rows * self.always * (self.sometimes if use else 1)).abs().square().mean()


class Wide(nn.Module):
    """Of parameters that have as many elements as are taken in during backward, one can be left out of a pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.sometimes, self.outward = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 7)

    def forward(self, rows: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = torch.tanh(self.inward(rows))
        return self.outward(self.sometimes(hidden) if use else hidden)
