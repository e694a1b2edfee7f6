"""BertAdam: the Adam that BERT was trained with, and its schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.formulas.formula import (
    FusibleFormula,
    Number,
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


class BertAdam(FusibleFormula):
    """p = p - lr · s · (m / (√v + e) + weight_decay · p), with a schedule s and no correction of m and v.

    s is 1 unless `t_total` is set. x is the number of updates before this one, divided by t_total. Below `warmup`
    s = x / warmup; then the schedule decides, and s stays 0 after the end (`warmup_constant`: 1).

    Source: Devlin et al., "BERT" (2019), in the form of torch_npu's NpuFusedBertAdam. pytorch_pretrained_bert 0.6.2 has
    the same, but clips each parameter separately and begins its cosine after the warmup. Ascend's apex has other
    defaults, b2=0.99 and max_grad_norm=-1. In torch_npu the cosine schedule raises, the polynomial one becomes complex
    after t_total, and the state counts no updates; here a resumed run continues its schedule.

    Args:
        params: parameters or groups.
        lr: learning rate.
        warmup: share of t_total in which the rate rises from 0; -1: no warmup, which with `warmup_linear` means
            s = (1 - x) / 2.
        t_total: updates that the schedule extends over; -1: no schedule.
        schedule: `"warmup_linear"`: (1 - x) / (1 - warmup); `"warmup_constant"`: 1; `"warmup_cosine"`:
            (1 + cos πx) / 2; `"warmup_poly"`: √(1 - x).
        b1, b2: decay of the first and second moment.
        e: added to the root of the second moment.
        weight_decay: share of the parameter in the update.
        max_grad_norm: the gradients of a group are scaled down to this total norm, unless it is NaN; -1: no clipping.
        state_dtype: see `Formula`.
    """

    by_group = True

    def __init__(
        self,
        params: Any,
        lr: float,
        warmup: float = -1,
        t_total: int = -1,
        schedule: str = "warmup_linear",
        b1: float = 0.9,
        b2: float = 0.999,
        e: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        state_dtype: str | None = None,
    ) -> None:
        not_negative(lr=lr, e=e, weight_decay=weight_decay)
        fractions(b1=b1, b2=b2)
        if warmup != -1:
            fractions(warmup=warmup)
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule={schedule!r} is unknown; available: {', '.join(_SCHEDULES)}")
        super().__init__(params, given(locals()), state_dtype=state_dtype)

    def factors(self, gradients: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        limits = [group["max_grad_norm"] for group in self.param_groups]
        return [
            self.clip_factor(_clip_factor, limit, group_gradients) if limit > 0 else None
            for limit, group_gradients in zip(limits, gradients, strict=True)
        ]

    def coefficients(self, group: dict[str, Any]) -> Numbers:
        numbers = options(group, "lr", "weight_decay", "e") | decay("beta1", group["b1"]) | decay("beta2", group["b2"])
        schedule = options(group, "schedule", "warmup", "t_total") if group["t_total"] != -1 else {"schedule": None}
        return numbers | schedule

    @staticmethod
    def gains(n: Numbers, step: Number) -> Numbers:
        return {"factor": None if n["schedule"] is None else _schedule_factor(n, step)}

    @staticmethod
    def arithmetic(n: Numbers, value: Tensor, gradient: Tensor, state: State, parts: None) -> None:
        mean, square = moments(n, gradient, state)
        update = plus_decay(n, value, mean / square.sqrt().add_(n["e"]))
        value.sub_(update * n["lr"] if n["factor"] is None else update * n["factor"] * n["lr"])


def _clip_factor(limit: float, gradients: Sequence[Tensor]) -> Tensor:
    return (limit / (norm_of(gradients) + 1e-6)).clamp(max=1.0).nan_to_num(1.0)


def _schedule_factor(n: Numbers, updates: Number) -> Tensor:
    """Return the factor of the learning rate in update number `updates`, counted from 1.

    It is float64 and on the device of `updates`, so that the host does not wait for a number counted on the device.
    """
    if not isinstance(updates, Tensor):
        updates = torch.tensor(updates, dtype=torch.float64, device="cpu")  # and not on the default device
    progress, warmup = (updates - 1) / n["t_total"], n["warmup"]
    return torch.where(progress < warmup, progress / warmup, _SCHEDULES[n["schedule"]](progress, warmup))


_SCHEDULES: dict[str, Callable[[Tensor, Number], Tensor]] = {
    "warmup_constant": lambda progress, warmup: torch.ones_like(progress),
    "warmup_cosine": lambda progress, warmup: 0.5 * (1.0 + torch.cos(math.pi * progress.clamp(max=1.0))),
    "warmup_linear": lambda progress, warmup: ((progress - 1.0) / (warmup - 1.0)).clamp(min=0.0),
    "warmup_poly": lambda progress, warmup: (1.0 - progress).clamp(min=0.0).sqrt(),
}
