"""Classes, options, parameters and gradients for the tests of the fused optimizers, torch_npu's own and ours."""

from __future__ import annotations

import torch
from torch import nn
from torch_npu import optim

OPTIONS = {
    "adadelta": {"lr": 0.5},
    "adam": {"lr": 0.01},
    "adamp": {"lr": 0.01},
    "adamw": {"lr": 0.01},
    "bertadam": {"lr": 0.01, "max_grad_norm": -1.0},
    "lamb": {"lr": 0.01},
    "rmsprop": {"lr": 0.01},
    "rmsproptf": {"lr": 0.01},
    "sgd": {"lr": 0.01, "momentum": 0.9},
}


VENDORS = {
    name.lower(): getattr(optim, f"NpuFused{name}")
    for name in ("Adadelta", "Adam", "AdamP", "AdamW", "BertAdam", "Lamb", "RMSprop", "RMSpropTF", "SGD")
}
"""torch_npu's classes, by the registry's name."""


def weights(count=2, dtype=torch.float32):
    """Parameters that are equal each time."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(3, 4, generator=generator).to("npu:0", dtype)) for _ in range(count)]


def gradients(parameters, seed=0, scale=1.0, in_place=False):
    """Give each parameter a gradient, as a new tensor or in the one it has."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = scale * torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        if in_place and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient


def values(parameters):
    return [parameter.detach().cpu().clone() for parameter in parameters]


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
