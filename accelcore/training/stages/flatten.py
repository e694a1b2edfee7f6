"""Flatten and Bind: choose the memory of parameters and gradients, and give the optimizer the tensors it updates."""

from __future__ import annotations

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.engine import needs_closure
from accelcore.optim.flat.memory import Slot, unfit
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.precision.policy import LOW_PRECISION
from accelcore.training.gradients import Flat, Gradients, Masters, PerTensor, ShardedGradients, runs
from accelcore.training.plan import Plan

__all__ = ["Bind", "Flatten"]


_FLAT_BELOW = 1 << 14
"""Elements per parameter, on average, up to which flat memory is faster; `benchmarks/flat.py` measures it."""


class Flatten:
    """Find the slots, lay them flat if asked to or if that is faster, and give them fp32 masters."""

    def check(self, plan: Plan) -> None:
        flat, sharded = plan.options["flat"], plan.strategy.layout == "shards"
        unfit_reason = "each rank has shards of the parameters" if sharded else unfit(_trained(plan))
        if flat and unfit_reason is not None:
            raise ConfigurationError(f"flat=True is not possible: {unfit_reason}", remedy="leave flat out")
        if isinstance(plan.optimizer, RoutedOptimizer):  # raises here if no route can update these parameters
            may_be_flat = flat is not False and unfit_reason is None
            plan.optimizer.route_for(_dtypes(plan), flat=may_be_flat, sharded=sharded)

    def apply(self, plan: Plan) -> None:
        plan.gradients.refresh(thorough=True)
        slots = _slots(plan)
        gradients: Gradients
        if plan.strategy.layout == "shards":
            gradients = ShardedGradients(slots)
        elif slots and _lies_flat(plan):
            gradients = Flat(slots, plan.optimizer.together if isinstance(plan.optimizer, RoutedOptimizer) else ())
        else:
            gradients = PerTensor(slots)
        if plan.policy.masters and any(slot.parameter.dtype in LOW_PRECISION for slot in slots):
            masters = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
            gradients = Masters(gradients, masters | plan.exact)
        plan.gradients, plan.exact = gradients, {}


def _trained(plan: Plan) -> list[Tensor]:
    return [parameter for parameters in plan.groups() for parameter in parameters if parameter.requires_grad]


def _slots(plan: Plan) -> list[Slot]:
    known = {id(parameter): (name, parameter) for name, parameter in plan.model.named_parameters()}
    return [
        Slot(known[id(member)][0], number, known[id(member)][1], member)
        for number, members in enumerate(plan.groups())
        for member in members
        if member.requires_grad
    ]


def _dtypes(plan: Plan) -> set[torch.dtype]:
    name, masters = plan.policy.model_dtype, plan.policy.masters
    dtypes = {getattr(torch, name) if name else parameter.dtype for parameter in _trained(plan)}
    if plan.policy.keep_batchnorm_fp32:
        dtypes.add(torch.float32)
    return {torch.float32 if masters and dtype in LOW_PRECISION else dtype for dtype in dtypes}


def _lies_flat(plan: Plan) -> bool:
    flat, trained, optimizer = plan.options["flat"], _trained(plan), plan.optimizer
    if flat is not None:
        return flat
    if not isinstance(optimizer, RoutedOptimizer) or unfit(trained) is not None:
        return False
    route = optimizer.route_for(_dtypes(plan), flat=True)
    has_sparse = any(getattr(module, "sparse", False) is True for module in plan.model.modules())  # torch's embeddings
    if route.memory != "any" or has_sparse:
        return route.memory == "flat"
    if plan.strategy.layout == "tensors":
        return False
    # A route that updates many scattered tensors at once gains nothing, and pays for copying the gradients.
    return not route.scattered and sum(parameter.numel() for parameter in trained) < _FLAT_BELOW * len(trained)


class Bind:
    """Bind an optimizer of accelcore to runs. In a torch optimizer, replace parameters by their fp32 masters."""

    def check(self, plan: Plan) -> None:
        optimizer = plan.optimizer
        if optimizer.needs_closure if isinstance(optimizer, RoutedOptimizer) else needs_closure(optimizer):
            raise UnsupportedError(
                f"a trainer cannot step {getattr(optimizer, 'name', type(optimizer).__name__)}",
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
