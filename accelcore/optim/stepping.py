"""The ways to call an engine's `step`: plainly, with a closure, with what a scaler found."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError

__all__ = ["Updating", "given", "loss_by", "needs_closure", "step_scaled"]


class Updating:
    """An optimizer whose `step` is an `update`, by what torch's scaler left on it. Put it before torch's class."""

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update what has a gradient, after dividing it by `grad_scale`; nothing where `found_inf` is 1."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, after computing the loss by `closure` if there is one; the loss."""
        loss = loss_by(closure)
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step` has to be given a closure, as that of torch's LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loss_by(closure: Callable[[], Any] | None) -> Any:
    """The loss that a closure computes, with gradients whatever the context is; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def given(closure: Callable[[], Any] | None, name: str) -> Callable[[], Any]:
    """The closure that an optimizer of this name needs.

    Raises:
        TrainingError: there is none.
    """
    if closure is None:
        raise TrainingError(
            f"{name} computes the loss more than once in a step, and was given nothing to compute it by",
            remedy="call step(closure), where closure() clears the gradients, calls backward and returns the loss",
        )
    return closure


def step_scaled(engine: Any, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
    """Call `step` as torch's scaler calls it on an optimizer that unscales and skips by itself."""
    if found_inf is None and grad_scale is None:
        engine.step()
        return
    engine.found_inf, engine.grad_scale = found_inf, grad_scale
    try:
        engine.step()
    finally:
        del engine.found_inf, engine.grad_scale
