"""Replicate: the ranks of a job train one model."""

from __future__ import annotations

from accelcore.training.plan import Plan

__all__ = ["Replicate"]


class Replicate:
    """Lets the strategy put what it needs around the model."""

    def check(self, plan: Plan) -> None:
        pass  # the strategy was checked when it was chosen

    def apply(self, plan: Plan) -> None:
        plan.forward = plan.strategy.replicate(plan.model, plan.gradients)
        plan.gradients.refresh()
