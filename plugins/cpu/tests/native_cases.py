"""What the tests of the CPU's kernels train, and how results are compared."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

SHAPES = [(6, 5), (7,), (), (0, 3), (1, 5), (130, 300), (3, 20_000), (2, 3, 4, 4)]
"""A matrix, a vector, a scalar, an empty one, one row, several pieces of rows, rows of several pieces, an image."""

OPTIONS = {
    "adadelta": [{}, {"weight_decay": 0.1, "maximize": True, "rho": 0.6}],
    "adam": [{}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}, {"decoupled_weight_decay": True}],
    "adamp": [
        {"weight_decay": 0.1},
        {"delta": 5.0, "weight_decay": 0.1},
        {"nesterov": True, "delta": 0.5},
        {"delta": 5.0, "eps": 0.0},
    ],
    "adamw": [{}, {"amsgrad": True, "betas": (0.4, 0.7)}],
    "bertadam": [
        {"lr": 0.01},
        {"lr": 0.01, "t_total": 4, "warmup": 0.3, "schedule": "warmup_cosine", "max_grad_norm": -1},
        {"lr": 0.01, "t_total": 3, "schedule": "warmup_poly"},
        {"lr": 0.01, "t_total": 4},
    ],
    "lamb": [{"weight_decay": 0.1}, {"adam": True}, {"use_global_grad_norm": True}, {"eps": 0.0}],
    "rmsprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "rmsproptf": [
        {},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
        {"momentum": 0.9, "lr_in_momentum": False, "decoupled_decay": True, "weight_decay": 0.01},
    ],
    "sgd": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    ],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@cache
def normal(seed, shapes):
    """Normal numbers, drawn once: that takes longer than a step of most optimizers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def parameters(dtype=torch.float32, shapes=SHAPES):
    found = []
    for number, drawn in enumerate(normal(1, tuple(shapes))):
        tensor = drawn * (10 if number % 2 else 0.1)
        dense = tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
        found.append(nn.Parameter(dense.to(dtype)))
    return found


def give_gradients(members, number, *, without=None, scale=1.0):
    members = list(members)
    shapes = tuple(parameter.shape for parameter in members)
    for position, (parameter, drawn) in enumerate(zip(members, normal(number, shapes), strict=True)):
        gradient = drawn * 10.0 ** (number % 3 - 2)
        parameter.grad = None if position == without else (gradient * scale).to(parameter.dtype)


def train(optimizer, members, steps=4, start=0):
    for number in range(start, start + steps):
        give_gradients(members, number, without=1 if number == 0 else None)  # one comes late
        optimizer.step()


def distance(found, expected):
    pairs = list(zip(found, expected, strict=True))
    return max((_distance(a, b) for a, b in pairs if a.numel()), default=0.0)  # SGD without momentum has no state


def _distance(found, expected):
    return ((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-6)).item()


def state_of(optimizer):
    return [v for entry in optimizer.state_dict()["state"].values() for _, v in sorted(entry.items())]
