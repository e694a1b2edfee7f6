"""Optimizers by the names of the registry, with the routes of the device that their parameters are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accelcore.apex.backends import backend_of
from accelcore.backend import Backend
from accelcore.optim.optimizer import Optimizer
from accelcore.roles.optimizers import Optimizers

__all__ = ["Parameters", "create", "settle"]

Parameters = Iterable[Any]
"""Tensors, or groups of them, as torch's optimizers take them."""

_registries: WeakKeyDictionary[torch.optim.Optimizer, tuple[torch.device, Optimizers]] = WeakKeyDictionary()


def create(name: str, params: Parameters, **options: Any) -> Optimizer:
    """The optimizer of that name on the device of its parameters."""
    given = list(params)
    backend = backend_of(_tensors(given))
    registry = backend.optimizers.copy()
    optimizer = registry.create(name, given, **options)
    _registries[optimizer] = backend.device, registry
    return optimizer


def settle(optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Let an optimizer that was made here, on another device, take its routes from this backend when it is bound."""
    device, registry = _registries.get(optimizer, (backend.device, backend.optimizers))
    if device != backend.device:
        registry.take_over(backend.optimizers)
        _registries[optimizer] = backend.device, registry


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for each in given:
        members = each["params"] if isinstance(each, dict) else [each]
        yield from [members] if isinstance(members, Tensor) else members
