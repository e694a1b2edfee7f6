"""Shard and Replicate: choose the strategy, and let it change the model before and after the optimizer is bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelcore.backend import SHARDED
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import as_shard, shard_of
from accelcore.training.options import FSDP, TrainerOptions
from accelcore.training.parallel.ddp import DDP
from accelcore.training.parallel.fsdp import FullySharded
from accelcore.training.parallel.strategy import (
    CombineDDP,
    SingleProcess,
    Strategy,
    broadcast_masters,
    check_no_launcher,
)
from accelcore.training.parallel.zero1 import Zero1
from accelcore.training.plan import Plan
from accelcore.util.text import did_you_mean

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Replicate", "Shard", "create_strategy"]


class Shard:
    """Create the strategy, divide the model, and give the optimizer the shards.

    `Strategy.layout` lists what shards change in the other stages.
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
            _train_instead(plan.optimizer, shards)


class Replicate:
    """Give all ranks rank 0's parameters, and let the strategy wrap the model."""

    def check(self, plan: Plan) -> None:
        pass  # `Shard` checked the strategy

    def apply(self, plan: Plan) -> None:
        plan.forward = plan.strategy.replicate(plan.model, plan.gradients)
        broadcast_masters(plan.strategy, plan.gradients)


def _train_instead(optimizer: Any, shards: Mapping[Any, Tensor]) -> None:
    """Replace whole parameters in an optimizer by their shards, and its state by shards of it."""
    entries = {
        shards[held]: {key: _cut(value, shards[held]) for key, value in entry.items()}
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


_NONE = "none"
_STRATEGIES: dict[str, Callable[[Backend, TrainerOptions], Strategy]] = {
    "ddp": DDP,
    "combine_ddp": CombineDDP,
    "zero1": Zero1,
    **dict.fromkeys(SHARDED, FullySharded),
}
_WITH_COMM_DTYPE = [name for name in _STRATEGIES if name != "ddp"]


def create_strategy(backend: Backend, options: TrainerOptions) -> Strategy:
    """Create the strategy of `parallel=`; in a job of one process always `SingleProcess`."""
    asked, declared = options["parallel"], backend.capabilities.parallel
    name = "fsdp" if isinstance(asked, FSDP) else asked
    world_size = backend.collectives.world_size
    known = [_NONE, *_STRATEGIES]
    offered = [strategy for strategy in known if strategy in declared or world_size == 1]
    if name is not None and name not in offered:
        why = "the backend does not declare it" if name in known else "there is no strategy of that name"
        raise UnsupportedError(
            f"parallel={name!r} is not available",
            why=why,
            available=", ".join(f"parallel={strategy!r}" for strategy in offered),
            remedy=did_you_mean(
                str(name), offered, "choose one of those, or leave parallel out for a job of one process"
            ),
        )
    if options["comm_dtype"] is not None and name not in _WITH_COMM_DTYPE:
        raise ConfigurationError(
            f"comm_dtype={options['comm_dtype']!r} cannot be used with parallel={name!r}",
            remedy=f"leave it out, or choose parallel={' or '.join(map(repr, _WITH_COMM_DTYPE))}",
        )
    if world_size == 1:
        if name != _NONE:
            check_no_launcher(
                "make and use the trainer inside `with accel.distributed():`; if the processes are meant to be "
                f'independent, set parallel="{_NONE}"'
            )
        return SingleProcess(backend, options)
    if name is None or name == _NONE:
        raise ConfigurationError(
            f"parallel={name!r} is not possible in a job of {world_size} ranks",
            available=", ".join(f'parallel="{strategy}"' for strategy in offered if strategy != _NONE),
            remedy="choose one, or leave accel.distributed() out to run independent processes",
        )
    return _STRATEGIES[name](backend, options)
