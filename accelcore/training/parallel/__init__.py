"""Strategies by which ranks share a training; `create_strategy` makes one for the option `parallel`.

Launchers, process groups and errors about lost ranks are in `jobs`.
"""

from __future__ import annotations

from collections.abc import Callable

from accelcore.devices import SHARDED, Roles
from accelcore.errors import ConfigurationError, UnsupportedError, did_you_mean
from accelcore.training.options import FSDP, TrainerOptions
from accelcore.training.parallel.ddp import DDP
from accelcore.training.parallel.fsdp import FullySharded
from accelcore.training.parallel.strategy import CombineDDP, SingleProcess, Strategy, Zero1, check_no_launcher

_NONE = "none"
_STRATEGIES: dict[str, Callable[[Roles, TrainerOptions], Strategy]] = {
    "ddp": DDP,
    "combine_ddp": CombineDDP,
    "zero1": Zero1,
    **dict.fromkeys(SHARDED, FullySharded),
}
_WITH_COMM_DTYPE = [name for name in _STRATEGIES if name != "ddp"]


def create_strategy(backend: Roles, options: TrainerOptions) -> Strategy:
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
                str(name), offered, "choose one of these, or leave parallel= out in a job of one process"
            ),
        )
    if options["comm_dtype"] is not None and name not in _WITH_COMM_DTYPE:
        raise ConfigurationError(
            f"comm_dtype={options['comm_dtype']!r} cannot be used with parallel={name!r}",
            remedy=f"remove it, or choose parallel={' or '.join(map(repr, _WITH_COMM_DTYPE))}",
        )
    if world_size == 1:
        if name != _NONE:
            check_no_launcher(
                "call accel.join() first, or make and use the trainer inside `with accel.distributed():`; for "
                f'independent processes set parallel="{_NONE}"'
            )
        return SingleProcess(backend, options)
    if name is None or name == _NONE:
        raise ConfigurationError(
            f"parallel={name!r} is not possible in a job of {world_size} ranks",
            available=", ".join(f'parallel="{strategy}"' for strategy in offered if strategy != _NONE),
            remedy='give "ddp" if the model fits on one device, and "fsdp" if not; or remove accel.join() or '
            "accel.distributed() to run independent processes",
        )
    return _STRATEGIES[name](backend, options)
