"""Adadelta: steps as long as the latest ones were, so that the learning rate needs no unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import Formula

__all__ = ["Adadelta"]


class Adadelta(Formula, torch.optim.Adadelta):
    """p = p - lr · δ, with δ = √(a + eps) / √(v + eps) · g, and a and v the running means of δ² and g².

    Weight decay is added to the gradient first. Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012); as
    torch.optim.Adadelta, whose options it has.
    """

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"square_avg": 0.0, "acc_delta": 0.0}

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        rho, eps = group["rho"], group["eps"]
        square, steps = state["square_avg"], state["acc_delta"]
        if group["weight_decay"]:
            gradient = gradient.add(value, alpha=group["weight_decay"])
        square.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        delta = (steps + eps).sqrt_().div_((square + eps).sqrt_()).mul_(gradient)
        steps.mul_(rho).addcmul_(delta, delta, value=1 - rho)
        value.sub_(delta * group["lr"])
