"""RMSprop, and what RMSpropTF shares with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import (
    FusibleFormula,
    Number,
    Numbers,
    State,
    decay,
    moving_average,
    options,
    plus_decay,
)

__all__ = ["RMSprop", "mean_square", "rmsprop_coefficients", "rmsprop_state"]


class RMSprop(FusibleFormula, torch.optim.RMSprop):
    """p = p - lr · g / (√v + eps), with v the running mean of g²; centered: of the variance of g, v - ḡ².

    Weight decay is added to the gradient first. With momentum, p = p - lr · b, with b = momentum · b + g / (√v + eps).
    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e (2012); centered: Graves, "Generating Sequences
    With Recurrent Neural Networks" (2013). As torch.optim.RMSprop, whose options it has.
    """

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return rmsprop_state(group, square=0.0)

    def coefficients(self, group: dict[str, Any], step: Number) -> Numbers:
        return rmsprop_coefficients(group)

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        gradient = plus_decay(n, value, gradient)
        update = gradient / mean_square(n, gradient, state).sqrt().add_(n["eps"])
        if n["momentum"] is not None:
            update = state["momentum_buffer"].mul_(n["momentum"]).add_(update)
        value.sub_(update * n["lr"])


def rmsprop_state(group: dict[str, Any], *, square: float) -> dict[str, float]:
    """Return the state: the mean square, which starts as `square`, the buffer of momentum, the mean gradient."""
    buffer = {"momentum_buffer": 0.0} if group["momentum"] else {}
    return {"square_avg": square} | buffer | ({"grad_avg": 0.0} if group["centered"] else {})


def rmsprop_coefficients(group: dict[str, Any]) -> Numbers:
    """Return the numbers that RMSprop and RMSpropTF share."""
    return options(group, "lr", "eps", "weight_decay", "momentum", "centered") | decay("alpha", group["alpha"])


def mean_square(n: Numbers, gradient: Tensor, state: State) -> Tensor:
    """Update the averages, and return v, or v - ḡ² if centered."""
    square = moving_average(state["square_avg"], n, "alpha", gradient * gradient)
    if not n["centered"]:
        return square
    mean = moving_average(state["grad_avg"], n, "alpha", gradient)
    return square - mean * mean
