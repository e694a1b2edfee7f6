"""Shard and Replicate: what the strategy does to the model, before and after the optimizer is bound."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import as_shard, shard_of
from accelcore.training.parallel.choose import create_strategy
from accelcore.training.plan import Plan

__all__ = ["Replicate", "Shard"]


class Shard:
    """Create the strategy, divide the model, and give the optimizer the shards."""

    def check(self, plan: Plan) -> None:
        if not hasattr(plan, "strategy"):  # `trainer.refresh()` keeps it
            plan.strategy = create_strategy(plan.backend, plan.options)
        plan.strategy.check(plan.model, plan.optimizer, plan.policy)
        if plan.strategy.layout == "shards" and plan.options["clip"] is not None:
            raise ConfigurationError(
                "clip= with a model that is divided among the ranks",
                why="the function would see only this rank's shards, not the whole gradients",
                remedy='set clip_norm=, which is computed over all ranks, or choose parallel="ddp"',
            )

    def apply(self, plan: Plan) -> None:
        before = dict(plan.model.named_parameters())
        plan.strategy.shard(plan.model, plan.policy)
        after = dict(plan.model.named_parameters())
        shards: dict[Tensor, Tensor] = {
            whole: after[name] for name, whole in before.items() if after[name] is not whole
        }
        if shards:
            _train_instead(plan.optimizer, shards)


class Replicate:
    """Give all ranks rank 0's parameters, and let the strategy wrap the model."""

    def check(self, plan: Plan) -> None:
        pass  # `Shard` checked the strategy

    def apply(self, plan: Plan) -> None:
        plan.forward = plan.strategy.replicate(plan.model, plan.gradients)
        plan.gradients.refresh()  # masters of parameters that rank 0 has overwritten


def _train_instead(optimizer: Any, shards: dict[Tensor, Tensor]) -> None:
    """Replace whole parameters in an optimizer by their shards, and its state by shards of it."""
    entries = {
        shards.get(held, held): {key: _cut(value, shards[held]) for key, value in entry.items()}
        for held, entry in optimizer.state.items()
        if held in shards
    }
    if isinstance(optimizer, RoutedOptimizer):
        optimizer.replace(shards, entries)
        return
    for group in optimizer.param_groups:
        group["params"] = [shards.get(held, held) for held in group["params"]]
    for held in shards:
        optimizer.state.pop(held, None)
    optimizer.state.update(entries)


def _cut(value: Any, parameter: Tensor) -> Any:
    divided = isinstance(value, Tensor) and value.dim() > 0
    return as_shard(shard_of(value, parameter), parameter) if divided else value
