"""torch's own classes of optimizers, as the registry knows them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from accelcore.optim.saved import SWITCHES

__all__ = ["name_of", "request_of"]


def name_of(kind: type) -> str | None:
    """The registry's name of a class of `torch.optim`; None for any other, also one that is derived from them."""
    is_torchs = issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] == "torch"
    return kind.__name__.lower() if is_torchs and kind is not torch.optim.Optimizer else None


def request_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The groups and options with which the like of an optimizer of torch's is made."""
    takes = inspect.signature(type(optimizer)).parameters  # a class may write more into its groups than it takes

    def chosen(options: dict[str, Any]) -> dict[str, Any]:
        left_out = {*SWITCHES, *(optimizer.defaults.keys() - takes.keys())}
        kept = {key: value for key, value in options.items() if key not in left_out}
        return {**kept, "differentiable": True} if options.get("differentiable") else kept

    return [chosen(group) for group in optimizer.param_groups], chosen(optimizer.defaults)
