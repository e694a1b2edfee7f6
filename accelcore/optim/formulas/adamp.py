"""AdamP: Adam without the part of an update that only changes the length of a scale-invariant weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.flat.segments import Channels, channels_of
from accelcore.optim.formulas.formula import (
    FusibleFormula,
    Number,
    Numbers,
    State,
    decay,
    fractions,
    given,
    moments,
    not_negative,
    options,
)


class AdamP(FusibleFormula):
    """Adam that removes the radial part of an update if a weight and its gradient are nearly orthogonal.

    d = m / (√v̂ + eps), or with Nesterov's momentum (b1 · m + (1 - b1) · g) / (√v̂ + eps). A parameter p of two or more
    dimensions is tested by rows, the slices along its first dimension, and then as one row. If every row has
    |cos(g, p)| < delta / √(elements in a row), d = d - p̂ · <p̂, d>, with p̂ = p / (‖p‖ + eps), and the weight decay is
    multiplied by wd_ratio. A row in which the sum of the gradient's squares overflows is not nearly orthogonal. Then
    p = p · (1 - lr · weight_decay) - lr / (1 - b1^t) · d.

    Source: Heo et al., "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights" (2021); as
    its authors' code, torch_optimizer's AdamP and torch_npu's NpuFusedAdamP.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, and to norms.
        weight_decay: decoupled from the gradient, as AdamW's.
        delta: how close to orthogonal weight and gradient have to be.
        wd_ratio: factor of the weight decay if the update is projected.
        nesterov: with Nesterov's momentum.
        state_dtype: see `Formula`.
    """

    by_element = False
    parts_of = staticmethod(channels_of)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        state_dtype: str | None = None,
    ) -> None:
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio)
        fractions(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        super().__init__(params, given(locals()), state_dtype=state_dtype)

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        beta1, beta2 = group["betas"]
        numbers = options(group, "lr", "eps", "weight_decay", "nesterov", "delta", "wd_ratio")
        return numbers | decay("beta1", beta1) | decay("beta2", beta2)

    @staticmethod
    def gains(n: Numbers, step: Number) -> Numbers:
        return {"mean_gain": 1 / (1 - n["beta1"] ** step), "root_gain": (1 - n["beta2"] ** step) ** -0.5}

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: Channels | None) -> None:
        mean, square = moments(n, gradient, state)
        if n["nesterov"]:
            mean = mean * n["beta1"] + gradient * n["1 - beta1"]
        update = mean / (square.sqrt() * n["root_gain"]).add_(n["eps"])
        decayed = value
        if parts is not None:
            projected, tangents = _projection(n, value, gradient, update, parts)
            update = update - parts.segments.multiply(value, tangents, elsewhere=0.0)
            if n["weight_decay"] is not None:
                shares = (torch.ones_like(tangents) * n["wd_ratio"]).where(projected, 1.0)
                decayed = parts.segments.multiply(value, shares, elsewhere=1.0)
        if n["weight_decay"] is not None:
            value.sub_(decayed * n["weight_decay"] * n["lr"])
        value.sub_(update * n["mean_gain"] * n["lr"])


def _projection(n: Numbers, value: Tensor, gradient: Tensor, update: Tensor, parts: Channels) -> tuple[Tensor, Tensor]:
    """Return for each channel whether the update is projected, and how much of the weight is taken from it."""
    segments, parameters, eps = parts.segments, parts.parameters, n["eps"]
    pairs = ((value, value), (gradient, gradient), (value, gradient), (value, update))
    by_channel = torch.stack([segments.sum(one * other) for one, other in pairs])
    by_parameter = parameters.sum(by_channel)

    def compare(sums: Tensor, roots: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return whether gradient and weight are nearly orthogonal, and how much of the weight is in the update."""
        weights, slopes, common, along = sums
        lengths = weights.sqrt().add_(eps)
        cosines = common.abs() / (slopes.sqrt().add_(eps) * lengths)
        return (cosines < roots * n["delta"]) & (slopes < math.inf), along / (lengths * lengths)

    orthogonal, tangents = compare(by_channel, parts.channel_roots)
    whole, tangent = compare(by_parameter, parts.parameter_roots)
    each = parameters.sum(orthogonal.logical_not().to(tangents.dtype)) == 0
    each, whole, tangent = (parameters.spread(value) for value in (each, whole, tangent))
    return each | whole, tangents.where(each, tangent.where(whole, 0.0))
