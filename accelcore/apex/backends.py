"""The backend of tensors: a script written for apex moves its model itself, and names its device by that."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from accelcore.backend import Backend
from accelcore.errors import AmpError
from accelcore.selection import select

__all__ = ["backend_of"]


def backend_of(tensors: Iterable[Tensor]) -> Backend:
    """The backend of the device that these are on; the CPU's where there are none.

    Raises:
        AmpError: they are on several devices.
        UnknownBackendError: no plugin for this device is installed.
        BackendUnavailableError: it cannot be used here.
    """
    devices = {tensor.device: None for tensor in tensors} or {torch.device("cpu"): None}
    if len(devices) > 1:
        raise AmpError(
            f"there are parameters on {' and '.join(map(str, devices))}",
            why="a model, what is trained with it and its optimizer's state are on one device",
            remedy="move all models to it before amp.initialize: model.to(device)",
        )
    return _selected(str(next(iter(devices))))


@cache
def _selected(device: str) -> Backend:
    return select(device)
