"""What a trainer saves, and how it is put back: all of it, or nothing."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.checkpoint import store
from accelcore.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from accelcore.training.trainer import Trainer

__all__ = ["resume", "save"]

logger = logging.getLogger("accelcore")

# How an update is computed, not what it computes: these stay as this run has them.
_ROUTE_SWITCHES = ("foreach", "fused", "capturable", "differentiable", "param_names")


def save(trainer: Trainer, folder: Path, keep: int | None) -> Path:
    """Write a new checkpoint; see `Trainer.save`."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(f"keep={keep!r} makes no sense", remedy="give a whole number, 1 or more, or None")
    collectives = trainer._backend.collectives
    first = collectives.rank == 0
    number = torch.zeros((), dtype=torch.int64, device=trainer._backend.device)
    with store.writing(folder):
        if first:
            store.begin(folder)
            store.write_part(folder, "model", trainer.model.state_dict())
            store.write_part(folder, "training", _shared_state(trainer))
        collectives.barrier()
        store.write_part(folder, f"rank-{collectives.rank:05d}", _rank_state(trainer))
        collectives.barrier()
        if first:
            facts = {
                "world_size": collectives.world_size,
                "device": trainer._backend.name,
                "accelcore": version("accelcore"),
                "torch": torch.__version__,
            }
            number.fill_(store.finish(folder, trainer.steps, facts))
    path = store.path_of(folder, trainer.steps, int(collectives.broadcast(number).item()))
    if first and keep is not None:
        later = store.keep_newest(path, keep)
        if later:
            logger.warning("%s also holds another run's checkpoints of later steps, such as %s", folder, later[-1].name)
    return path


def resume(trainer: Trainer, folder: Path) -> Path | None:
    """Go on from a checkpoint; see `Trainer.resume`."""
    path = folder
    if not store.is_checkpoint_name(folder):
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file", remedy="give the folder that checkpoints were saved to")
        found = store.checkpoints(folder)
        if not found:
            return None
        path = found[-1]
    _restore(trainer, store.Checkpoint(path))
    return path


def _shared_state(trainer: Trainer) -> dict[str, Any]:
    return {
        "optimizer": _optimizer_state(trainer.model, trainer.optimizer),
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
    }


def _rank_state(trainer: Trainer) -> dict[str, Any]:
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {
        "rng": trainer._backend.runtime.rng_state(),
        "feeds": {name: feed.state_dict() for name, feed in trainer._feeds.items()},
        "micro": trainer._micro,
        "accumulate": trainer.accumulate,
        "gradients": {name: gradient for name, gradient in gradients.items() if gradient is not None},
    }


def _restore(trainer: Trainer, checkpoint: store.Checkpoint) -> None:
    """Read and check everything first; only then change anything."""
    collectives = trainer._backend.collectives
    model = checkpoint.part("model")
    shared = checkpoint.part("training")
    _check_model(trainer.model, model)
    if (trainer.scheduler is None) != (shared["scheduler"] is None):
        raise CheckpointError(
            "either the checkpoint or this trainer has a scheduler, and the other has none",
            remedy="build the trainer as it was built when the checkpoint was saved",
        )
    optimizer = _torch_optimizer_state(trainer.model, trainer.optimizer, shared["optimizer"])
    own = _own_rank_state(trainer, checkpoint)
    if own["micro"] and own["accumulate"] != trainer.accumulate:
        raise CheckpointError(
            f"the checkpoint was saved within a window of {own['accumulate']} micro-batches, "
            f"and this trainer accumulates {trainer.accumulate}",
            remedy=f"resume with accumulate={own['accumulate']}, or from a checkpoint saved between two windows",
        )

    before = trainer.scaler.state_dict()
    try:
        trainer.scaler.load_state_dict(shared["scaler"])
        trainer.optimizer.load_state_dict(optimizer)
    except Exception:
        trainer.scaler.load_state_dict(before)
        raise
    if trainer.scheduler is not None:
        trainer.scheduler.load_state_dict(shared["scheduler"])
    trainer.model.load_state_dict(model)
    trainer.steps = checkpoint.manifest["steps"]
    trainer._restart(own["micro"], own["gradients"])
    for name, position in own["feeds"].items():
        trainer._feed(name).load_state_dict(position)
    if own["rng"]:
        left = trainer._backend.runtime.set_rng_state(own["rng"])
        if left:
            logger.warning("random state of another kind of device is not restored: %s", ", ".join(left))
    collectives.barrier()


def _own_rank_state(trainer: Trainer, checkpoint: store.Checkpoint) -> dict[str, Any]:
    collectives = trainer._backend.collectives
    saved_by = checkpoint.manifest["world_size"]
    if saved_by == collectives.world_size:
        state: dict[str, Any] = checkpoint.part(f"rank-{collectives.rank:05d}")
        return state
    state = checkpoint.part("rank-00000")
    if state["micro"] or any(position["taken"] for position in state["feeds"].values()):
        raise CheckpointError(
            f"the checkpoint was saved by {saved_by} ranks in mid-epoch, and this job has {collectives.world_size}",
            why="the part of the data that was seen cannot be shared out among another number of ranks",
            remedy=f"resume with {saved_by} ranks, or from a checkpoint saved at the end of an epoch",
        )
    if collectives.rank == 0:
        logger.warning(
            "the checkpoint was saved by %d ranks, this job has %d: random states are not restored",
            saved_by,
            collectives.world_size,
        )
    return {**state, "rng": {}}


def _check_model(model: nn.Module, saved: dict[str, Any]) -> None:
    own = model.state_dict()
    problems = [f"{name} is missing in the checkpoint" for name in own.keys() - saved.keys()]
    problems += [f"{name} is unknown to the model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        mine, theirs = _kind(own[name]), _kind(saved[name])
        if mine != theirs:
            problems.append(f"{name} is {mine} in the model and {theirs} in the checkpoint")
    if problems:
        shown = "; ".join(sorted(problems)[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(
            "the checkpoint is of another model", why=shown, remedy="build the model as it was when it was saved"
        )


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state under the names of the parameters, free of how the update is computed."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    order: dict[int, str] = {}
    groups = []
    for group, live in zip(state["param_groups"], optimizer.param_groups, strict=True):
        members = [names[id(parameter)] for parameter in live["params"]]
        order.update(zip(group["params"], members, strict=True))
        options = {key: value for key, value in group.items() if key not in _ROUTE_SWITCHES}
        groups.append({**options, "params": members})
    return {"groups": groups, "state": {order[number]: entry for number, entry in state["state"].items()}}


def _torch_optimizer_state(model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """`_optimizer_state` as this optimizer's own `load_state_dict` takes it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numbers: dict[str, int] = {}
    groups = []
    for number, live in enumerate(optimizer.param_groups):
        members = [names[id(parameter)] for parameter in live["params"]]
        theirs = saved["groups"][number] if number < len(saved["groups"]) else {"params": []}
        own_options = {key for key in live if key not in (*_ROUTE_SWITCHES, "params")}
        if set(theirs["params"]) != set(members) or own_options != set(theirs) - {"params"}:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: parameter group {number} differs",
                why=f"{len(members)} parameters with {sorted(own_options)} here, "
                f"{len(theirs['params'])} with {sorted(set(theirs) - {'params'})} there",
                remedy="build the optimizer as it was when the checkpoint was saved",
            )
        for name in members:
            numbers[name] = len(numbers)
        switches = {key: live[key] for key in _ROUTE_SWITCHES if key in live}
        groups.append({**theirs, **switches, "params": [numbers[name] for name in members]})
    if len(saved["groups"]) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, this one {len(groups)}"
        )
    return {"state": {numbers[name]: entry for name, entry in saved["state"].items()}, "param_groups": groups}
