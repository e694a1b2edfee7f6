"""What the tests of loss scaling have in common: steps whose gradients are given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

INF, NAN = math.inf, math.nan
ROUTES = ("fused", "loop", "foreach", "native")


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values or (1.0, -2.0), dtype=dtype))


def in_use(scaler):
    """A scaler that has scaled a loss: before, it refuses gradients."""
    scaler.scale(torch.ones(()))
    return scaler


def train_step(scaler, optimizer, weight, factors):
    """One step of the loss sum(factors * weight), whose gradient is `factors`."""
    optimizer.zero_grad()
    scaler.scale((weight * torch.tensor(factors)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@dataclass
class Side:
    """One scaler, with its own copy of the weights and an optimizer over them."""

    scaler: object
    kind: str
    weights: list[torch.nn.Parameter] = field(default_factory=lambda: [parameter(0.5, -2.0, 8.0), parameter(1.0)])

    def __post_init__(self):
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.weights, lr=0.25, momentum=0.5, foreach=False),
            "sgd fused": lambda: torch.optim.SGD(self.weights, lr=0.25, fused=True),
            "adam": lambda: torch.optim.Adam(self.weights, lr=0.25, foreach=False),
            "adamw fused": lambda: torch.optim.AdamW(self.weights, lr=0.25, fused=True),
            "adagrad fused": lambda: torch.optim.Adagrad(self.weights, lr=0.25, fused=True),
        }
        self.optimizer = kinds[self.kind]()

    def step(self, gradients, *, unscale):
        self.optimizer.zero_grad()
        loss = sum((weight * torch.tensor(g)).sum() for weight, g in zip(self.weights, gradients, strict=True))
        self.scaler.scale(loss).backward()
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
