"""A small model, its data, its loss and its optimizers, for tests that need one and do not mind which."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

OPTIMIZERS = {
    "ours": lambda accel, parameters: accel.optimizers.create("adamw", parameters, lr=0.05, eps=1e-3),
    "torch's": lambda accel, parameters: torch.optim.AdamW(parameters, lr=0.05, eps=1e-3),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2))


def data(count: int, seed: int = 1, *, shape: tuple[int, int, int] = (8, 6, 2)):
    """Batches of inputs and targets; `shape`: rows, inputs, outputs."""
    rows, *widths = shape
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(rows, width, generator=generator) for width in widths) for _ in range(count)]


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def precision_watch():
    """A function that changes nothing, and a list of the precision of products in its forward and backward passes."""
    seen: list[str] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch.get_float32_matmul_precision())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.get_float32_matmul_precision())
            return gradient

    return Watch.apply, seen
