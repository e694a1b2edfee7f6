"""Oracles of optimizers: torch.optim's classes and four more, with every option that changes the result."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.testing.support.oracles_optim import AdamP, BertAdam, Lamb, RMSpropTF

LR = 0.05
STEPS = 8  # RAdam looks at the second moment from the sixth on

OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"adam": True},
    "alpha": {"alpha": 0.3, "lambd": 1.0},
    "amsgrad": {"amsgrad": True},
    "b1": {"b1": 0.5},
    "b2": {"b2": 0.7},
    "betas": {"betas": (0.5, 0.7)},
    "centered": {"centered": True},
    "dampening": {"dampening": 0.5, "momentum": 0.9},
    "decoupled_decay": {"decoupled_decay": True, "weight_decay": 0.1},
    "decoupled_weight_decay": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "delta": {"delta": 3.0},
    "e": {"e": 0.5},
    "eps": {"eps": 0.5},
    "etas": {"etas": (0.3, 1.5)},
    "initial_accumulator_value": {"initial_accumulator_value": 0.5},
    "lambd": {"lambd": 0.1},
    "lr_decay": {"lr_decay": 0.1},
    "lr_in_momentum": {"lr_in_momentum": False, "momentum": 0.5},
    "max_grad_norm": {"max_grad_norm": 0.1},
    "maximize": {"maximize": True},
    "momentum": {"momentum": 0.7},
    "momentum_decay": {"momentum_decay": 0.5},
    "nesterov": {"nesterov": True, "momentum": 0.9},
    "rho": {"rho": 0.6},
    "schedule": {"schedule": "warmup_cosine", "warmup": 0.3, "t_total": 6},
    "step_sizes": {"step_sizes": (1e-3, 0.07)},
    "t0": {"t0": 2.0},
    "t_total": {"t_total": 6},
    "use_global_grad_norm": {"use_global_grad_norm": True},
    "warmup": {"warmup": 0.3, "t_total": 6},
    "wd_ratio": {"wd_ratio": 0.5, "weight_decay": 0.1, "delta": 3.0},
    "weight_decay": {"weight_decay": 0.1},
}
"""A value of each option that is not its default, with other options under which it has an effect."""

_CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {  # with several of its options together
    "adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1, "rho": 0.8}),
    "adagrad": (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adamax": (torch.optim.Adamax, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "adamp": (AdamP, {"weight_decay": 0.1, "nesterov": True, "delta": 0.9}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "asgd": (torch.optim.ASGD, {"weight_decay": 0.1, "alpha": 0.6}),
    "bertadam": (BertAdam, {"schedule": "warmup_linear", "t_total": 20, "b1": 0.8, "max_grad_norm": 2.0}),
    "lamb": (Lamb, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "nadam": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (torch.optim.RAdam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "rmsproptf": (RMSpropTF, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {"etas": (0.3, 1.5), "step_sizes": (1e-3, 0.07)}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


_MORE: dict[str, list[dict[str, Any]]] = {
    "bertadam": [
        {"schedule": "warmup_constant", "warmup": 0.3, "t_total": 6},
        {"schedule": "warmup_poly", "warmup": 0.2, "t_total": 7},
        {"max_grad_norm": -1.0},
    ],
}
"""More values of options that have more than two."""


def taken_by(kind: Any) -> set[str]:
    """Return the options that an oracle takes."""
    return set(getattr(kind, "options", None) or inspect.signature(kind).parameters)


def options_of(name: str) -> dict[str, dict[str, Any]]:
    """Return the options that show each option of an oracle."""
    taken = taken_by(_CLASSES[name][0])
    return {
        option: {key: value for key, value in OPTIONS[option].items() if key in taken}
        for option in sorted(taken)
        if option in OPTIONS
    }


def _together(name: str) -> Iterator[dict[str, Any]]:
    """Yield each switch beside a value of every option that is no switch and that the oracle takes beside it."""
    options = options_of(name)
    switches = [values for option, values in options.items() if isinstance(values[option], bool)]
    for switch in switches or [{}]:
        chosen = dict(switch)
        for values in options.values():
            more = {key: value for key, value in values.items() if key not in chosen}
            if values not in switches:
                with suppress(ValueError):
                    _CLASSES[name][0]([torch.ones(1)], **chosen, **more)
                    chosen |= more
        yield chosen


ORACLES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    name: (kind, [{}, *options_of(name).values(), *_MORE.get(name, []), *_together(name), together])
    for name, (kind, together) in _CLASSES.items()
}
"""The oracle for each name, and the options of the comparison: none, each alone, each switch with all others, several
together (last)."""


def oracle(name: str, members: Any, **options: Any) -> torch.optim.Optimizer:
    """Create the oracle of that name; torch's classes use their plain loop."""
    kind = ORACLES[name][0]
    made: torch.optim.Optimizer = kind(
        members, **({"foreach": False} if "foreach" in taken_by(kind) else {}), **options
    )
    return made


EVERY = sorted(ORACLES)

NINE = ("adadelta", "adam", "adamp", "adamw", "bertadam", "lamb", "rmsprop", "rmsproptf", "sgd")
"""The optimizers that every backend has, whatever its author registers."""


def parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return parameters of several shapes: a matrix, a vector, a scalar, a strided one; the same each time."""
    generator = torch.Generator().manual_seed(5)
    image = torch.randn(2, 3, 4, 4, generator=generator).contiguous(memory_format=torch.channels_last)
    start = [torch.randn(6, 5, generator=generator), torch.randn(7, generator=generator), torch.tensor(0.5), image]
    return [nn.Parameter(tensor.to(device, dtype)) for tensor in start]


@cache
def gradients(number: int) -> list[Tensor]:
    """Return the gradients of the `number`-th step, on the CPU, not to be changed: the first are the largest."""
    generator = torch.Generator().manual_seed(100 + number)
    size = 3.0 if number == 0 else 0.5
    return [size * torch.randn(tensor.shape, generator=generator) for tensor in parameters(torch.device("cpu"))]


def step(optimizer: torch.optim.Optimizer, members: list[nn.Parameter], number: int, *, without: int = -1) -> None:
    """Make one step with the gradients of that number; the parameter `without` has none."""
    for index, (parameter, gradient) in enumerate(zip(members, gradients(number), strict=False)):
        parameter.grad = None
        if index != without:  # with the strides that autograd would give it
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()
