"""RMSprop, also in the form of TensorFlow, and Adadelta: steps divided by the root of a running mean square."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import (
    FusibleFormula,
    Numbers,
    State,
    decay,
    given,
    moving_average,
    not_negative,
    options,
    plus_decay,
)


class _MeanSquare(FusibleFormula):
    """Base of RMSprop and RMSpropTF."""

    start = 0.0  # of the mean square

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        buffer = {"momentum_buffer": 0.0} if group["momentum"] else {}
        return {"square_avg": self.start} | buffer | ({"grad_avg": 0.0} if group["centered"] else {})

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        return options(group, "lr", "eps", "weight_decay", "momentum", "centered") | decay("alpha", group["alpha"])


class RMSprop(_MeanSquare, torch.optim.RMSprop):
    """p = p - lr · g / (√v + eps), with v the running mean of g²; centered: of the variance of g, v - ḡ².

    Weight decay is added to the gradient first. With momentum, p = p - lr · b, with b = momentum · b + g / (√v + eps).
    Source: Hinton, "Neural Networks for Machine Learning", lecture 6e (2012); centered: Graves, "Generating Sequences
    With Recurrent Neural Networks" (2013). As torch.optim.RMSprop, whose options it has.
    """

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        gradient = plus_decay(n, value, gradient)
        update = gradient / _mean_square(n, gradient, state).sqrt().add_(n["eps"])
        if n["momentum"] is not None:
            update = state["momentum_buffer"].mul_(n["momentum"]).add_(update)
        value.sub_(update * n["lr"])


class RMSpropTF(_MeanSquare):
    """p = p - lr · g / √(v + eps), with v the running mean of g², which starts at 1; centered: v - ḡ².

    With momentum, b = momentum · b + lr · g / √(v + eps) and p = p - b, so that a new lr changes only new updates.
    Source: TensorFlow 1's RMSPropOptimizer, in the form of timm's RMSpropTF and torch_npu's NpuFusedRMSpropTF. timm's
    decoupled decay is scaled by lr, this one is not; Ascend's apex starts v at 0.

    Args:
        params: parameters or groups.
        lr: learning rate.
        alpha: decay of the mean square and the mean gradient.
        eps: added to the mean square, inside the root.
        weight_decay: share of the parameter that is added to the gradient.
        momentum: decay of the buffer of updates; 0: no buffer.
        centered: divide by the variance of the gradient, not by its square.
        decoupled_decay: p is multiplied by 1 - weight_decay instead; lr has no part in that.
        lr_in_momentum: False: b = momentum · b + g / √(v + eps) and p = p - lr · b.
        state_dtype: see `Formula`.
    """

    start = 1.0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        decoupled_decay: bool = False,
        lr_in_momentum: bool = True,
        state_dtype: str | None = None,
    ) -> None:
        not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        super().__init__(params, given(locals()), state_dtype=state_dtype)

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        return super().coefficients(group) | options(group, "decoupled_decay", "lr_in_momentum")

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        if n["weight_decay"] is not None and n["decoupled_decay"]:
            value.sub_(value * n["weight_decay"])
        else:
            gradient = plus_decay(n, value, gradient)
        update = gradient / (_mean_square(n, gradient, state) + n["eps"]).sqrt_()
        early = n["momentum"] is not None and n["lr_in_momentum"]
        update = update * n["lr"] if early else update
        if n["momentum"] is not None:
            update = state["momentum_buffer"].mul_(n["momentum"]).add_(update)
        value.sub_(update if early else update * n["lr"])


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


def _mean_square(n: Numbers, gradient: Tensor, state: State) -> Tensor:
    """Update the averages, and return v, or v - ḡ² if centered."""
    square = moving_average(state["square_avg"], n, "alpha", gradient * gradient)
    if not n["centered"]:
        return square
    mean = moving_average(state["grad_avg"], n, "alpha", gradient)
    return square - mean * mean
