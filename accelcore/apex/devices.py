"""Backends by the device of tensors, and optimizers of that device: a script for apex moves its model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accelcore.backend import Backend
from accelcore.devices.select import select
from accelcore.errors import AmpError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.registry import Optimizers

__all__ = ["Parameters", "backend_of", "choose_routes_again", "create_optimizer"]

Parameters = Iterable[Any]
"""Tensors, or groups of them, as torch's optimizers take them."""

_registries: WeakKeyDictionary[torch.optim.Optimizer, tuple[torch.device, Optimizers]] = WeakKeyDictionary()


def backend_of(tensors: Iterable[Tensor]) -> Backend:
    """Return the backend of the tensors' device; without tensors, the CPU's.

    Raises:
        AmpError: the tensors are on several devices.
        UnknownBackendError: no plugin for the device is installed.
        BackendUnavailableError: the device cannot be used here.
    """
    devices = {tensor.device: None for tensor in tensors} or {torch.device("cpu"): None}
    if len(devices) > 1:
        raise AmpError(
            f"there are parameters on {' and '.join(map(str, devices))}",
            why="models that are trained together and their optimizers' state must be on one device",
            remedy="move all models to it before amp.initialize: model.to(device)",
        )
    return _selected(str(next(iter(devices))))


def create_optimizer(name: str, params: Parameters, **options: Any) -> RoutedOptimizer:
    """Create an optimizer of the registry, on the device of its parameters."""
    given = list(params)
    backend = backend_of(_tensors(given))
    registry = backend.optimizers.copy()
    optimizer = registry.create(name, given, **options)
    _registries[optimizer] = backend.device, registry
    return optimizer


def choose_routes_again(optimizer: torch.optim.Optimizer, backend: Backend) -> None:
    """Let an optimizer that was created on another device use this backend's routes from its next binding on."""
    device, registry = _registries.get(optimizer, (backend.device, backend.optimizers))
    if device != backend.device:
        registry.take_over(backend.optimizers)
        _registries[optimizer] = backend.device, registry


@cache
def _selected(device: str) -> Backend:
    return select(device)


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    for each in given:
        members = each["params"] if isinstance(each, dict) else [each]
        yield from [members] if isinstance(members, Tensor) else members
