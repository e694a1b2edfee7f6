"""BertAdam for the NPU, with arithmetic of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch_npu import optim

from accelcore_npu.arguments import fractions, not_negative
from accelcore_npu.flat import FlatOptimizer

__all__ = ["BertAdam"]


class BertAdam(FlatOptimizer, optim.NpuFusedBertAdam):  # type: ignore[misc]
    """Adam without bias correction, with a schedule of its own.

    The arithmetic is written out here, because in torch_npu's own the cosine schedule raises, the polynomial one
    becomes complex after `t_total`, the clipping norm of later groups is ignored, and the state counts no updates.
    """

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
    ) -> None:
        not_negative(lr=lr, e=e, weight_decay=weight_decay)
        fractions(b1=b1, b2=b2)
        if warmup != -1:
            fractions(warmup=warmup)
        if schedule not in _SCHEDULES:
            raise ValueError(f"there is no schedule {schedule!r}, only {', '.join(_SCHEDULES)}")
        super().__init__(
            params,
            {
                "lr": lr,
                "schedule": schedule,
                "warmup": warmup,
                "t_total": t_total,
                "b1": b1,
                "b2": b2,
                "e": e,
                "weight_decay": weight_decay,
                "max_grad_norm": max_grad_norm,
            },
        )

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _group_step(self, group_index: int) -> None:
        group = self.param_groups[group_index]
        values = self.combined_params_indexed_by_group[group_index]
        gradients = self.combined_grads_indexed_by_group[group_index]
        states = self.combined_param_states_indexed_by_group[group_index]
        if group["max_grad_norm"] > 0 and gradients:
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, (group["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0))
        for value, gradient, state in zip(values, gradients, states, strict=True):
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.mul_(group["b1"]).add_(gradient, alpha=1 - group["b1"])
            square.mul_(group["b2"]).addcmul_(gradient, gradient, value=1 - group["b2"])
            update = mean / square.sqrt().add_(group["e"])
            if group["weight_decay"] > 0:
                update.add_(value, alpha=group["weight_decay"])
            value.add_(update, alpha=-group["lr"] * _schedule(group, state["step"]))
            self.state[value]["step"] += 1


def _schedule(group: dict[str, Any], updates: int) -> float:
    if group["t_total"] == -1:
        return 1.0
    progress, warmup = updates / group["t_total"], group["warmup"]
    return progress / warmup if progress < warmup else _SCHEDULES[group["schedule"]](progress, warmup)


_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "warmup_constant": lambda progress, warmup: 1.0,
    "warmup_cosine": lambda progress, warmup: 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))),
    "warmup_linear": lambda progress, warmup: max((progress - 1.0) / (warmup - 1.0), 0.0),
    "warmup_poly": lambda progress, warmup: max(1.0 - progress, 0.0) ** 0.5,
}
