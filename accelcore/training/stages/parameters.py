"""Shard, Bind and Replicate: divide the model, lay out parameters and masters, bind the optimizer, replicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.binding import joint_groups
from accelcore.optim.engine import needs_closure
from accelcore.optim.flat.memory import Run, Slot, unfit
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import divided_as
from accelcore.precision.policy import LOW_PRECISION
from accelcore.training.gradients import Flat, Gradients, Masters, PerTensor, ShardedGradients
from accelcore.training.parallel import create_strategy
from accelcore.training.parallel.strategy import broadcast_masters
from accelcore.training.plan import Plan, Stage

_FLAT_BELOW = 1 << 14
"""Elements per parameter, on average, up to which flat memory is faster; `benchmarks/flat.py` measures it."""


class Shard(Stage):
    """Create the strategy, divide the model, and give the optimizer the shards.

    `FullySharded` lists what shards change in the other stages.
    """

    def check(self, plan: Plan) -> None:
        if not hasattr(plan, "strategy"):  # `trainer.refresh()` keeps it
            plan.strategy = create_strategy(plan.backend, plan.options)
        plan.strategy.check(plan.model, plan.optimizer, plan.policy)
        if plan.strategy.layout == "shards" and plan.options["clip"] is not None:
            raise ConfigurationError(
                "clip= cannot be used with a sharded model: it would see only this rank's shards of the gradients",
                remedy='set clip_norm=, which is computed over all ranks, or choose parallel="ddp"',
            )

    def apply(self, plan: Plan) -> None:
        before = dict(plan.model.named_parameters())
        plan.strategy.shard(plan.model, plan.policy)
        after = dict(plan.model.named_parameters())
        if shards := {whole: after[name] for name, whole in before.items() if after[name] is not whole}:
            _replace(plan.optimizer, shards, divided_as)


class Bind(Stage):
    """Find the slots, choose their memory, and give the optimizer the tensors that it updates.

    Slots are laid flat if asked for or if that is faster, and get fp32 masters. An optimizer of accelcore is bound to
    runs of them. In a torch optimizer, masters replace the parameters.
    """

    def check(self, plan: Plan) -> None:
        flat, sharded, optimizer = plan.options["flat"], plan.strategy.layout == "shards", plan.optimizer
        unfit_reason = "each rank has shards of the parameters" if sharded else unfit(_trained(plan))
        if flat and unfit_reason is not None:
            raise ConfigurationError(f"flat=True is not possible: {unfit_reason}", remedy="remove flat")
        if isinstance(optimizer, RoutedOptimizer):  # raises here if no route can update these parameters
            may_be_flat = flat is not False and unfit_reason is None
            optimizer.route_for(_dtypes(plan), flat=may_be_flat, sharded=sharded)
        if optimizer.needs_closure if isinstance(optimizer, RoutedOptimizer) else needs_closure(optimizer):
            raise UnsupportedError(
                f"a trainer cannot step {getattr(optimizer, 'name', type(optimizer).__name__)}",
                remedy="call its step(closure) in a loop of your own, or choose another optimizer",
            )

    def apply(self, plan: Plan) -> None:
        plan.gradients.refresh(thorough=True)
        plan.gradients, plan.exact = _gradients(plan), {}
        if isinstance(plan.optimizer, RoutedOptimizer):
            plan.optimizer.bind(_runs(plan.gradients))
        else:
            _give_masters(plan)


class Replicate(Stage):
    """Give all ranks rank 0's parameters, and let the strategy wrap the model."""

    def apply(self, plan: Plan) -> None:
        plan.forward = plan.strategy.replicate(plan.model, plan.gradients)
        broadcast_masters(plan.strategy, plan.gradients)


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


def _gradients(plan: Plan) -> Gradients:
    slots = _slots(plan)
    gradients: Gradients
    if plan.strategy.layout == "shards":
        gradients = ShardedGradients(slots)
    elif slots and _lies_flat(plan):
        optimizer = plan.optimizer
        joint = joint_groups(optimizer.name, optimizer.param_groups) if isinstance(optimizer, RoutedOptimizer) else ()
        gradients = Flat(slots, joint)
    else:
        gradients = PerTensor(slots)
    if plan.policy.masters and any(slot.parameter.dtype in LOW_PRECISION for slot in slots):
        masters = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
        gradients = Masters(gradients, masters | plan.exact)
    return gradients


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


def _runs(gradients: Gradients) -> list[Run]:
    """Return what an optimizer updates: each tensor, or stretches of flat memory."""
    found: list[Run] = []
    for number, (memory, value, gradient) in enumerate(
        zip(gradients.flat, gradients.values, gradients.of_values(), strict=True)
    ):
        if memory is None:
            found.append(Run([gradients.slots[number]], value))
        elif gradient is not None:
            found += memory.runs(value, gradient)
    return found


def _give_masters(plan: Plan) -> None:
    """Replace parameters by their fp32 masters in the groups and the state of a torch optimizer."""
    trained = {id(slot.parameter): slot.trained for slot in plan.gradients.slots}
    held = chain.from_iterable(group["params"] for group in plan.optimizer.param_groups)
    pairs = [(each, trained.get(id(plan.of_model(each)), plan.of_model(each))) for each in held]
    _replace(plan.optimizer, {each: target for each, target in pairs if each is not target}, _as_exact)
    swapped = [slot for slot in plan.gradients.slots if slot.trained is not slot.parameter]
    plan.masters = {id(slot.trained): slot.parameter for slot in swapped}


def _replace(optimizer: Any, replacements: Mapping[Any, Tensor], convert: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace tensors in an optimizer's groups and state. `convert` makes the state of the new one from the old."""
    entries = {
        replacements[old]: {
            key: convert(value, replacements[old]) if isinstance(value, Tensor) and value.dim() else value
            for key, value in entry.items()
        }
        for old, entry in optimizer.state.items()
        if old in replacements
    }
    if isinstance(optimizer, RoutedOptimizer):
        optimizer.replace(replacements, entries)
        return
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(held, held) for held in group["params"]]
    for held in replacements:
        optimizer.state.pop(held, None)
    optimizer.state.update(entries)


def _as_exact(value: Tensor, target: Tensor) -> Tensor:
    fits = value.is_floating_point() and value.shape == target.shape
    return value.to(torch.promote_types(value.dtype, target.dtype)) if fits else value
