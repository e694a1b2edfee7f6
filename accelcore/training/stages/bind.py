"""Bind: the optimizer is given what it trains."""

from __future__ import annotations

from torch import Tensor

from accelcore.optim.optimizer import Optimizer
from accelcore.training.plan import Plan

__all__ = ["Bind"]


class Bind:
    """An optimizer of accelcore is bound to runs; in another the tensors of its groups are swapped for masters."""

    def check(self, plan: Plan) -> None:
        pass  # any optimizer can be bound

    def apply(self, plan: Plan) -> None:
        if isinstance(plan.optimizer, Optimizer):
            plan.optimizer.bind(plan.gradients.trained_runs())
            return
        trained = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
        for group in plan.optimizer.param_groups:
            group["params"] = [trained.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in list(plan.optimizer.state):
            master = trained.get(id(parameter), parameter)
            if master is not parameter:
                entry = plan.optimizer.state.pop(parameter)
                plan.optimizer.state[master] = {key: _as_master(value, master) for key, value in entry.items()}


def _as_master(value: object, master: Tensor) -> object:
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == master.shape and value.dim()
    return value.to(master.dtype) if fits and isinstance(value, Tensor) else value
