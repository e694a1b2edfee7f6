"""Lamb in the form of Ascend's apex: the step of each parameter in proportion to its norm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from accelcore.optim.flat.segments import Segments, Whole, parameters_of
from accelcore.optim.formulas.formula import (
    FusibleFormula,
    Numbers,
    State,
    decay,
    fractions,
    given,
    moments,
    norm_of,
    not_negative,
    options,
    plus_decay,
)

_LARGEST_NORM = 10.0  # larger norms of a parameter are cut off here


class Lamb(FusibleFormula):
    """p = p - lr · min(‖p‖, 10) / ‖u‖ · u, where u = m / (√v + eps) + weight_decay · p.

    The ratio is 1 where either norm is 0. Source: You et al., "Large Batch Optimization for Deep Learning" (2020), in
    the form of its first version, which Ascend's apex and torch_npu's NpuFusedLamb have: no bias correction, norms of
    parameters cut off at 10. NVIDIA's FusedLAMB differs in both.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: share of the parameter in the update.
        adam: the ratio is always 1.
        use_global_grad_norm: gradients are divided by their total norm if that exceeds 1. NaN does not.
        state_dtype: see `Formula`.
    """

    by_element = False
    parts_of = staticmethod(parameters_of)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
        use_global_grad_norm: bool = False,
        state_dtype: str | None = None,
    ) -> None:
        not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        fractions(**{"betas[0]": betas[0], "betas[1]": betas[1]})
        super().__init__(params, given(locals()), state_dtype=state_dtype)

    def factors(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        wanted = [group["use_global_grad_norm"] for group in self.param_groups]
        factor = self.clip_factor(_clip_factor, 1.0, list(chain.from_iterable(gradients))) if any(wanted) else None
        return [factor if wants else None for wants in wanted]

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        beta1, beta2 = group["betas"]
        return options(group, "lr", "weight_decay", "eps", "adam") | decay("beta1", beta1) | decay("beta2", beta2)

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: Segments | Whole) -> None:
        mean, square = moments(n, gradient, state)
        update = plus_decay(n, value, mean / square.sqrt().add_(n["eps"]))
        if not n["adam"]:
            norms, lengths = parts.norm(value).clamp(max=_LARGEST_NORM), parts.norm(update)
            ratios = (norms / lengths).where((norms > 0) & (lengths > 0), 1.0)
            update = parts.multiply(update, ratios, elsewhere=0.0)
        value.sub_(update * n["lr"])


def _clip_factor(limit: float, gradients: Sequence[Tensor]) -> Tensor:
    return (limit / norm_of(gradients).clamp(min=limit)).nan_to_num(1.0)
