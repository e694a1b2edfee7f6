"""Contracts of a backend that have no folder of their own: the runtime and the compiler; and `from_torch`.

The other roles are in `precision`, `scaling`, `optim` and `jobs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcore.roles.torch_device import from_torch

__all__ = ["from_torch"]


def __getattr__(name: str) -> object:
    if name != "from_torch":
        raise AttributeError(f"module 'accelcore.roles' has no attribute {name!r}")
    from accelcore.roles.torch_device import from_torch  # it composes all roles, which import this package

    return from_torch
