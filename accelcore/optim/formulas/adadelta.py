"""Adadelta: the size of a step follows the latest steps, so that the learning rate has no unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import FusibleFormula, Numbers, State, decay, moving_average, options, plus_decay


class Adadelta(FusibleFormula, torch.optim.Adadelta):
    """p = p - lr · δ, with δ = √(a + eps) / √(v + eps) · g, and a and v the running means of δ² and g².

    Weight decay is added to the gradient first. Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012); as
    torch.optim.Adadelta, whose options it has.
    """

    state_names = ("square_avg", "acc_delta")

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        return options(group, "lr", "eps", "weight_decay") | decay("rho", group["rho"])

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        square, steps = state["square_avg"], state["acc_delta"]
        gradient = plus_decay(n, value, gradient)
        moving_average(square, n, "rho", gradient * gradient)
        delta = (steps + n["eps"]).sqrt_().div_((square + n["eps"]).sqrt_()).mul_(gradient)
        moving_average(steps, n, "rho", delta * delta)
        value.sub_(delta * n["lr"])
