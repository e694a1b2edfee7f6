"""Formulas over whole runs: the same few operators for one parameter as for thousands, and no wait of the host.

One arithmetic for devices where each operator is a launch, and for compilers that make one kernel of many operators.
For these, numbers are tensors without dimensions, so that another learning rate or momentum is no other program; so
they only ever multiply or add. What depends on several of them is computed on the host, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.flat_route import FlatRoute, Number, Numbers, State
from accelcore.optim.formulas.adadelta import Adadelta
from accelcore.optim.formulas.adamp import AdamP
from accelcore.optim.formulas.bertadam import BertAdam, schedule_factor
from accelcore.optim.formulas.lamb import LARGEST_NORM, Lamb
from accelcore.optim.formulas.rmsprop import RMSprop
from accelcore.optim.formulas.rmsproptf import RMSpropTF
from accelcore.optim.runs import Run
from accelcore.optim.segments import Channels, Segments, channels_of, parameters_of

__all__ = ["FLAT_FORMULAS"]


class FlatAdadelta(FlatRoute, Adadelta):
    """Adadelta over runs."""

    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        return _some(group, "lr", "eps", "weight_decay") | _mean("delta", group["rho"])

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        square, steps = state["square_avg"], state["acc_delta"]
        gradient = _decayed(n, value, gradient)
        _take_in(square, n, "delta", gradient * gradient)
        delta = (steps + n["eps"]).sqrt_().div_((square + n["eps"]).sqrt_()).mul_(gradient)
        _take_in(steps, n, "delta", delta * delta)
        value.sub_(delta * n["lr"])


class _FlatRMSprop(FlatRoute):
    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        numbers = _some(group, "lr", "eps", "weight_decay", "momentum", "centered")
        return numbers | _mean("alpha", group["alpha"])


class FlatRMSprop(_FlatRMSprop, RMSprop):
    """RMSprop over runs."""

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        gradient = _decayed(n, value, gradient)
        update = gradient / _mean_square(n, gradient, state).sqrt().add_(n["eps"])
        if n["momentum"] is not None:
            update = state["momentum_buffer"].mul_(n["momentum"]).add_(update)
        value.sub_(update * n["lr"])


class FlatRMSpropTF(_FlatRMSprop, RMSpropTF):
    """RMSpropTF over runs."""

    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        return super().numbers(group, step) | _some(group, "decoupled_decay", "lr_in_momentum")

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        if n["weight_decay"] is not None and n["decoupled_decay"]:
            value.sub_(value * n["weight_decay"])
        else:
            gradient = _decayed(n, value, gradient)
        update = gradient / (_mean_square(n, gradient, state) + n["eps"]).sqrt_()
        early = n["momentum"] is not None and n["lr_in_momentum"]
        update = update * n["lr"] if early else update
        if n["momentum"] is not None:
            update = state["momentum_buffer"].mul_(n["momentum"]).add_(update)
        value.sub_(update if early else update * n["lr"])


class FlatBertAdam(FlatRoute, BertAdam):
    """BertAdam over runs."""

    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        numbers = _some(group, "lr", "weight_decay", "e") | _moments(group["b1"], group["b2"])
        return numbers | {"schedule": None if group["t_total"] == -1 else schedule_factor(group, step)}

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        mean, square = _take_in_moments(n, gradient, state)
        update = _with_weight(n, value, mean / square.sqrt().add_(n["e"]))
        value.sub_(update * n["lr"] if n["schedule"] is None else update * n["schedule"] * n["lr"])


class FlatLamb(FlatRoute, Lamb):
    """Lamb over runs."""

    def parts_of(self, run: Run) -> Segments:
        return parameters_of(run)

    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        return _some(group, "lr", "weight_decay", "eps", "adam") | _moments(*group["betas"])

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: Segments) -> None:
        mean, square = _take_in_moments(n, gradient, state)
        update = _with_weight(n, value, mean / square.sqrt().add_(n["eps"]))
        if not n["adam"]:
            norms, lengths = parts.norm(value).clamp(max=LARGEST_NORM), parts.norm(update)
            ratios = (norms / lengths).where((norms > 0) & (lengths > 0), 1.0)
            update = parts.multiply(update, ratios, elsewhere=0.0)
        value.sub_(update * n["lr"])


class FlatAdamP(FlatRoute, AdamP):
    """AdamP over runs."""

    def parts_of(self, run: Run) -> Channels | None:
        return channels_of(run)

    def numbers(self, group: dict[str, Any], step: Number) -> Numbers:
        beta1, beta2 = group["betas"]
        numbers = _some(group, "lr", "eps", "weight_decay", "nesterov") | _moments(beta1, beta2)
        corrections = {"mean_gain": 1 / (1 - beta1**step), "root_gain": (1 - beta2**step) ** -0.5}
        return numbers | corrections | {"delta": group["delta"], "wd_ratio": group["wd_ratio"]}

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: Channels | None) -> None:
        mean, square = _take_in_moments(n, gradient, state)
        if n["nesterov"]:
            mean = mean * n["beta1"] + gradient * n["rest of beta1"]
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
    """For each channel: whether the update is projected, and how much of the weight is taken from it."""
    segments, parameters, eps = parts.segments, parts.parameters, n["eps"]
    pairs = ((value, value), (gradient, gradient), (value, gradient), (value, update))
    by_channel = torch.stack([segments.sum(one * other) for one, other in pairs])
    by_parameter = parameters.sum(by_channel)

    def seen(sums: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Whether gradient and weight are nearly orthogonal, and what of the weight is in the update."""
        weights, slopes, common, along = sums
        lengths = weights.sqrt().add_(eps)
        cosines = common.abs() / (slopes.sqrt().add_(eps) * lengths)
        return cosines < roots * n["delta"], along / (lengths * lengths)

    orthogonal, tangents = seen(by_channel, parts.channel_roots)
    whole, tangent = seen(by_parameter, parts.parameter_roots)
    each = parameters.sum(orthogonal.logical_not().to(tangents.dtype)) == 0
    each, whole, tangent = (parameters.spread(value) for value in (each, whole, tangent))
    return each | whole, tangents.where(each, tangent.where(whole, 0.0))


def _some(group: dict[str, Any], *names: str) -> Numbers:
    """Options by these names; None for a weight decay or momentum of 0, which is left out of the arithmetic."""
    absent = ("weight_decay", "momentum")
    return {name: None if name in absent and not group[name] else group[name] for name in names}


def _mean(name: str, decay: float) -> Numbers:
    """The two numbers of a running mean."""
    return {name: decay, f"rest of {name}": 1 - decay}


def _moments(beta1: float, beta2: float) -> Numbers:
    return _mean("beta1", beta1) | _mean("beta2", beta2)


def _take_in(mean: Tensor, n: Numbers, name: str, new: Tensor) -> Tensor:
    return mean.mul_(n[name]).add_(new * n[f"rest of {name}"])


def _take_in_moments(n: Numbers, gradient: Tensor, state: State) -> tuple[Tensor, Tensor]:
    mean = _take_in(state["exp_avg"], n, "beta1", gradient)
    return mean, _take_in(state["exp_avg_sq"], n, "beta2", gradient * gradient)


def _mean_square(n: Numbers, gradient: Tensor, state: State) -> Tensor:
    square = _take_in(state["square_avg"], n, "alpha", gradient * gradient)
    if not n["centered"]:
        return square
    mean = _take_in(state["grad_avg"], n, "alpha", gradient)
    return square - mean * mean


def _decayed(n: Numbers, value: Tensor, gradient: Tensor) -> Tensor:
    return gradient if n["weight_decay"] is None else gradient + value * n["weight_decay"]


def _with_weight(n: Numbers, value: Tensor, update: Tensor) -> Tensor:
    return update if n["weight_decay"] is None else update + value * n["weight_decay"]


FLAT_FORMULAS: dict[str, Callable[..., FlatRoute]] = {
    "adadelta": FlatAdadelta,
    "adamp": FlatAdamP,
    "bertadam": FlatBertAdam,
    "lamb": FlatLamb,
    "rmsprop": FlatRMSprop,
    "rmsproptf": FlatRMSpropTF,
}
"""By the registry's name."""
