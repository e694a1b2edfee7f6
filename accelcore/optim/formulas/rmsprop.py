"""RMSprop, and the mean square that it and RMSpropTF divide by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import Formula

__all__ = ["RMSprop", "rmsprop_square", "rmsprop_state"]


class RMSprop(Formula, torch.optim.RMSprop):
    """p = p - lr · g / (√v + eps), with v the running mean of g²; centered: of the variance of g, v - ḡ².

    Weight decay is added to the gradient first. With momentum, p = p - lr · b, with b = momentum · b + g / (√v + eps).
    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e (2012); centered: Graves, "Generating Sequences
    With Recurrent Neural Networks" (2013). As torch.optim.RMSprop, whose options it has.
    """

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return rmsprop_state(group, square=0.0)

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        update = gradient / rmsprop_square(group, gradient, state).sqrt().add_(group["eps"])
        if group["momentum"]:
            update = state["momentum_buffer"].mul_(group["momentum"]).add_(update)
        value.sub_(update * group["lr"])


def rmsprop_state(group: dict[str, Any], *, square: float) -> dict[str, float]:
    """The mean square, which starts as `square`; a buffer with momentum, the mean gradient where centered."""
    buffer = {"momentum_buffer": 0.0} if group["momentum"] else {}
    return {"square_avg": square} | buffer | ({"grad_avg": 0.0} if group["centered"] else {})


def rmsprop_square(group: dict[str, Any], gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """v, or v - ḡ² where centered, after both took in the gradient."""
    alpha = group["alpha"]
    square: Tensor = state["square_avg"]
    square.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
    if not group["centered"]:
        return square
    mean = state["grad_avg"].lerp_(gradient, 1 - alpha)
    return square.addcmul(mean, mean, value=-1)
