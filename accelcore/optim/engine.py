"""Contract of an optimizer kernel, and an adapter for optimizers that have only `step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.optim.flat.memory import Run

__all__ = ["Engine", "as_engine", "equal_groups", "loss_by", "merged", "needs_closure", "options_of"]

_NOT_OPTIONS = ("params", "param_names", "initial_lr")


class Engine:
    """Contract of an optimizer kernel: `class Lion(Engine, torch.optim.Optimizer)`, registered as a route's factory.

    An engine has the groups and the state of a `torch.optim.Optimizer`. `update` is the one method to write.
    `RoutedOptimizer` handles hooks, schedulers, closures, `state_dict` and memory, and calls the engine.

    Attributes:
        keeps_shapes: whether every tensor of the state, except counters, has the shape of its parameter. A state of
            another shape is then refused when it is loaded.
        counts_on_device: whether `state[p]["step"]` is on the device of `p`, not on the host.
        _step_supports_amp_scaling: torch's name: whether `update` takes `found_inf` and `grad_scale`. If not, both are
            always None.
    """

    keeps_shapes = False
    counts_on_device = False
    _step_supports_amp_scaling = False

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update, in place, each tensor of `param_groups` that has a `grad`, and its state.

        Args:
            found_inf: a scalar on the device; the update must do nothing if it is 1.0.
            grad_scale: a scalar on the device by which the gradients must be divided first.
        """
        raise NotImplementedError

    def place_runs(self, runs: Sequence[Run]) -> None:
        """Note which parameters each tensor of `param_groups` holds. Called whenever these tensors change."""

    def replaced(self) -> bool:
        """Return whether a parameter may have other memory than in the last update. False saves a check of each."""
        return True

    def state_dtype(self, group: dict[str, Any], value: Tensor) -> torch.dtype:
        """Return the dtype in which the state of a tensor is kept."""
        return value.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute the loss by `closure`, if there is one, then update. Return the loss."""
        loss = loss_by(closure)
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss


class _BySteps(Engine):
    """Engine of an optimizer that has only `step`, called as torch's scaler calls it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        optimizer = self._optimizer
        if found_inf is None and grad_scale is None:
            optimizer.step()
            return
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale


def as_engine(optimizer: Optimizer) -> Engine:
    """Return the engine that an optimizer is, or one that calls its `step`."""
    return optimizer if isinstance(optimizer, Engine) else _BySteps(optimizer)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` must be given a closure, as that of torch's LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loss_by(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that a closure computes, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def equal_groups(groups: Sequence[dict[str, Any]]) -> list[int]:
    """Return for each parameter group the number of the first group with equal options.

    An update that treats each element alike gives the same result for two such groups as for one of both. Options are
    compared by value if they are numbers, words or tuples of these; others, such as tensors, by identity.
    """
    firsts: dict[frozenset[tuple[str, Any]], int] = {}
    keys = (frozenset((key, _comparable(value)) for key, value in options_of(group).items()) for group in groups)
    return [firsts.setdefault(key, number) for number, key in enumerate(keys)]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def merged(groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the parameter groups; groups with equal options become one."""
    if len(groups) == 1:
        return groups
    members: dict[int, list[dict[str, Any]]] = {}
    for first, group in zip(equal_groups(groups), groups, strict=True):
        members.setdefault(first, []).append(group)
    return [
        {**same[0], "params": list(chain.from_iterable(group["params"] for group in same))} for same in members.values()
    ]


def _comparable(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return value if value is None or isinstance(value, int | float | str) else id(value)
