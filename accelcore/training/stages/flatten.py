"""Flatten: who owns what is trained, and in what memory it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.optim.memory import unfit
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.runs import Slot
from accelcore.precision.table import LOW_PRECISION
from accelcore.training.gradients import Flat, Gradients, PerTensor
from accelcore.training.masters import Masters
from accelcore.training.plan import Plan
from accelcore.training.sharded_gradients import ShardedGradients

__all__ = ["Flatten"]

_WORTH = 1 << 14
"""Elements. With more to a parameter on average, copying gradients costs more than calling kernels for each saves: the
update of 400 parameters of one size is as fast either way at 2^14, and flat up to 1.4 times slower beyond (measured on
a CPU, by benchmarks/flat.py; AdamW by torch's fused kernel). A route that updates many scattered tensors at once gains
nothing from flat memory, and pays for the copies (the same program; AdamW by the CPU's own kernels)."""


class Flatten:
    """Finds the slots, lays them flat where that was asked for or is faster, and gives them fp32 masters."""

    def check(self, plan: Plan) -> None:
        flat, reason = plan.options["flat"], _unfit(plan)
        if flat not in (True, False, None):
            raise ConfigurationError(f"flat={flat!r} is neither yes nor no", available="True, False, or None to choose")
        if flat and reason is not None:
            raise ConfigurationError(f"flat=True cannot be done: {reason}", remedy="leave flat out")
        if isinstance(plan.optimizer, RoutedOptimizer):  # refuses now what no route can update
            plan.optimizer.route_for(
                _dtypes(plan), flat=flat is not False and reason is None, sharded=plan.strategy.layout == "shards"
            )

    def apply(self, plan: Plan) -> None:
        plan.gradients.refresh()
        slots = _slots(plan)
        together = plan.optimizer.together if isinstance(plan.optimizer, RoutedOptimizer) else ()
        gradients: Gradients
        if plan.strategy.layout == "shards":
            gradients = ShardedGradients(slots)
        else:
            gradients = Flat(slots, together) if slots and _lies_flat(plan) else PerTensor(slots)
        if plan.policy.masters and any(slot.parameter.dtype in LOW_PRECISION for slot in slots):
            gradients = Masters(gradients, plan.gradients)
        plan.gradients = gradients


def _trained(plan: Plan) -> list[Tensor]:
    return [parameter for parameters in plan.groups() for parameter in parameters if parameter.requires_grad]


def _unfit(plan: Plan) -> str | None:
    """Why what is trained cannot lie flat; None where it can."""
    return "each rank has shards of the parameters" if plan.strategy.layout == "shards" else unfit(_trained(plan))


def _slots(plan: Plan) -> list[Slot]:
    known = {id(parameter): (name, parameter) for name, parameter in plan.model.named_parameters()}
    return [
        Slot(known[id(member)][0], number, known[id(member)][1], member)
        for number, members in enumerate(plan.groups())
        for member in members
        if member.requires_grad
    ]


def _dtypes(plan: Plan) -> set[torch.dtype]:
    """The dtypes that are trained in: a parameter's own, or its master's."""
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
    sparse = any(getattr(module, "sparse", False) is True for module in plan.model.modules())  # torch's embeddings
    if route.memory != "any" or sparse:
        return route.memory == "flat"
    if plan.strategy.layout == "tensors":
        return False
    return not route.scattered and sum(parameter.numel() for parameter in trained) < _WORTH * len(trained)
