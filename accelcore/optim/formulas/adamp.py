"""AdamP: Adam without the part of a step that only lengthens a weight whose length has no effect."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.checks import fractions, not_negative
from accelcore.optim.formulas.formula import Formula

__all__ = ["AdamP"]


class AdamP(Formula):
    """Adam, with the update d of a weight projected onto what is orthogonal to it, where its gradient nearly is.

    d = m / (√v̂ + eps), or with Nesterov's momentum (b1 · m + (1 - b1) · g) / (√v̂ + eps). A parameter p of two or more
    dimensions is looked at row by row (its first dimension's), then as one row. Where each row's
    |cos(g, p)| < delta / √(elements in a row), d = d - p̂ · <p̂, d>, with p̂ = p / (‖p‖ + eps), and weight decay counts
    wd_ratio times only. Then p = p · (1 - lr · weight_decay) - lr / (1 - b1^t) · d.

    Source: Heo et al., "AdamP: Slowing Down the Slowdown for Momentum Optimizers on Scale-invariant Weights" (2021); as
    its authors' code, torch_optimizer's AdamP and torch_npu's NpuFusedAdamP.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, and to norms.
        weight_decay: decoupled from the gradient, as AdamW's.
        delta: how close to orthogonal weight and gradient have to be.
        wd_ratio: share of the weight decay where an update is projected.
        nesterov: with Nesterov's momentum.
        state_dtype: see `Formula`.

    Raises:
        ValueError: an option is out of range.
    """

    by_element = False

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "delta": delta,
            "wd_ratio": wd_ratio,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, state_dtype=state_dtype)

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def compute(self, group: dict[str, Any], value: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        (beta1, beta2), lr, eps = group["betas"], group["lr"], group["eps"]
        mean, square, updates = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = torch.lerp(gradient, mean, beta1) if group["nesterov"] else mean
        update = update / (square / (1 - beta2**updates)).sqrt_().add_(eps)
        share: float | Tensor = 1.0
        if value.dim() > 1 and value.numel():
            update, projected = _projected(update, value, gradient, group["delta"], eps)
            share = torch.where(projected, group["wd_ratio"], torch.ones_like(projected, dtype=value.dtype))
        if group["weight_decay"]:
            value.mul_(1 - lr * group["weight_decay"] * share)
        value.sub_(update * (lr / (1 - beta1**updates)))


def _projected(update: Tensor, value: Tensor, gradient: Tensor, delta: float, eps: float) -> tuple[Tensor, Tensor]:
    """The update, projected where it should be, and whether it was. The host decides nothing, and need not wait."""
    result, already = update, torch.zeros((), dtype=torch.bool, device=value.device)
    for rows in (value.shape[0], 1):
        weights, slopes, steps = (tensor.reshape(rows, -1) for tensor in (value, gradient, update))
        lengths = weights.norm(dim=1, keepdim=True).add_(eps)
        cosines = (weights * slopes).sum(1).abs() / (slopes.norm(dim=1).add_(eps) * lengths[:, 0])
        orthogonal = (cosines.max() < delta / math.sqrt(weights.shape[1])) & ~already
        units = weights / lengths
        tangent = steps - units * (units * steps).sum(1, keepdim=True)
        result = tangent.view(value.shape).where(orthogonal, result)
        already = already | orthogonal
    return result, already
