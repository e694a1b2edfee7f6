"""Tensors in containers: dicts, lists, tuples and dataclasses of them, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["detached", "moved"]

T = TypeVar("T")


def moved(value: T, device: torch.device) -> T:
    """`value` with its tensors, and what else has a method `to`, on a device; what is there already is not copied."""

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=part.is_pinned())
        if isinstance(part, type):
            return part
        return part.to(device) if callable(getattr(part, "to", None)) else NotImplemented

    result: T = _mapped(value, move)
    return result


def detached(value: T) -> T:
    """`value` with its tensors outside the graph that made them, so that they do not keep it alive."""

    def detach(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.detach() if part.requires_grad else part
        return part if isinstance(part, type) else NotImplemented

    result: T = _mapped(value, detach)
    return result


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with each part of it as `change` makes it; what that returns NotImplemented for, is looked into."""
    changed = change(value)
    if changed is not NotImplemented:
        return changed
    if isinstance(value, Mapping):
        entries = {key: _mapped(entry, change) for key, entry in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(entries)  # type: ignore[call-arg]
        like = copy.copy(value)  # keeps what a subclass has beside its entries, such as a default
        for key, entry in entries.items():
            like[key] = entry
        return like
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(entry, change) for entry in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(entry, change) for entry in value)
    if dataclasses.is_dataclass(value):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(twin, field.name, _mapped(getattr(value, field.name), change))
        return twin
    return value
