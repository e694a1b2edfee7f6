"""Shard: the ranks of a job divide the model among themselves, where their strategy does that."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import as_shard, shard_of
from accelcore.training.plan import Plan
from accelcore.training.strategies.choose import create_strategy
from accelcore.training.strategies.strategy import Strategy

__all__ = ["Shard"]


class Shard:
    """Chooses the strategy, and lets the optimizer train shards in place of the parameters they were cut from."""

    def check(self, plan: Plan) -> None:
        before: Strategy | None = getattr(plan, "strategy", None)
        plan.strategy = create_strategy(plan.backend, plan.options)
        if before is not None:
            plan.strategy.take_over(before)
        plan.strategy.check(plan.model, plan.policy)
        plan.strategy.check_optimizer(plan.optimizer)
        if plan.strategy.shards and plan.options["clip"] is not None:
            raise ConfigurationError(
                "clip= and a model that is divided among the ranks",
                why="the function would see this rank's shards alone, and each rank would clip by norms of its own",
                remedy='say clip_norm=, which is computed over all ranks, or parallel="ddp"',
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


def _train_instead(optimizer: Any, shards: dict[Tensor, Tensor]) -> None:
    """Let an optimizer train shards in place of the parameters they were cut from, and take its state along."""
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
