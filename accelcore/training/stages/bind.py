"""Bind: give the optimizer the tensors that it updates."""

from __future__ import annotations

from torch import Tensor

from accelcore.errors import UnsupportedError
from accelcore.optim.engine import needs_closure
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.training.gradients.base import runs
from accelcore.training.plan import Plan

__all__ = ["Bind"]


class Bind:
    """Bind an optimizer of accelcore to runs. In a torch optimizer, replace parameters by their fp32 masters."""

    def check(self, plan: Plan) -> None:
        optimizer = plan.optimizer
        if optimizer.needs_closure if isinstance(optimizer, RoutedOptimizer) else needs_closure(optimizer):
            raise UnsupportedError(
                f"a trainer cannot step {getattr(optimizer, 'name', type(optimizer).__name__)}",
                why="it computes the loss of a batch several times in a step, and a trainer computes it once",
                remedy="call its step(closure) in a loop of your own, or choose another optimizer",
            )

    def apply(self, plan: Plan) -> None:
        if isinstance(plan.optimizer, RoutedOptimizer):
            plan.optimizer.bind(runs(plan.gradients), in_part=plan.strategy.owners is not None)
            return
        trained = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
        members, state = plan.groups(), plan.optimizer.state
        for held in list(state):
            parameter = plan.of_model(held)
            target = trained.get(id(parameter), parameter)
            if target is not held:
                entry = state.pop(held)
                state[target] = entry if target is parameter else {k: _as_master(v, target) for k, v in entry.items()}
        for group, parameters in zip(plan.optimizer.param_groups, members, strict=True):
            group["params"] = [trained.get(id(parameter), parameter) for parameter in parameters]
        swapped = [slot for slot in plan.gradients.slots if slot.trained is not slot.parameter]
        plan.masters = {id(slot.trained): slot.parameter for slot in swapped}


def _as_master(value: object, master: Tensor) -> object:
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == master.shape and value.dim()
    return value.to(master.dtype) if fits and isinstance(value, Tensor) else value
