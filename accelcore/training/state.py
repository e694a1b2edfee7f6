"""What a trainer saves, and how it is put back: all of it, or nothing."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    with ExitStack() as held:
        with _together(trainer):
            if first:
                with store.writing(folder):
                    held.enter_context(store.alone(folder))
                    store.begin(folder)
                    store.write_part(folder, "model", trainer.model.state_dict())
                    store.write_part(folder, "training", _shared_state(trainer))
        with _together(trainer), store.writing(folder):
            store.write_part(folder, f"rank-{collectives.rank:05d}", _rank_state(trainer))
        with _together(trainer):
            if first:
                with store.writing(folder):
                    number.fill_(store.finish(folder, trainer.steps, _facts(trainer)))
    path = store.path_of(folder, trainer.steps, int(collectives.broadcast(number).item()))
    if first and keep is not None:
        with store.writing(folder):
            later = store.keep_newest(path, keep)
        if later:
            logger.warning("%s also holds another run's checkpoints of later steps, such as %s", folder, later[-1].name)
    return path


@contextmanager
def _together(trainer: Trainer) -> Iterator[None]:
    """A stage of a save that all ranks leave alike: where one fails, all raise, and none waits for it."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised again below, when all ranks know
        failure = error
    failed = torch.tensor(failure is not None, dtype=torch.int32, device=trainer._backend.device)
    trainer._backend.collectives.all_reduce(failed, "max")
    if failure is not None:
        raise failure
    if failed.item():
        raise CheckpointError("another rank could not save its part of the checkpoint", why="see that rank's error")


def _facts(trainer: Trainer) -> dict[str, Any]:
    return {
        "world_size": trainer._backend.collectives.world_size,
        "device": trainer._backend.name,
        "accelcore": version("accelcore"),
        "torch": torch.__version__,
    }


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
    checkpoint = store.Checkpoint(path)
    try:
        _restore(trainer, checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the checkpoint {path} lacks what a trainer needs", why=repr(error)) from error
    return path


def _shared_state(trainer: Trainer) -> dict[str, Any]:
    return {
        "optimizer": _optimizer_state(trainer.model, trainer.optimizer),
        "schedule": type(trainer.scheduler).__name__,
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "scaler": trainer.scaler.state_dict(),
    }


def _rank_state(trainer: Trainer) -> dict[str, Any]:
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()} if trainer._micro else {}
    # Within a window the ranks' buffers may differ: they are made one when the window ends.
    buffers = dict(trainer.model.named_buffers()) if trainer._micro else {}
    return {
        "buffers": buffers,
        "rng": trainer._backend.runtime.rng_state(),
        "feeds": {name: feed.state_dict() for name, feed in trainer._feeds.items()},
        "micro": trainer._micro,
        "accumulate": trainer.accumulate,
        "gradients": {name: gradient for name, gradient in gradients.items() if gradient is not None},
    }


def _restore(trainer: Trainer, checkpoint: store.Checkpoint) -> None:
    """Read and check everything first; then change what may still refuse, and the model last."""
    model, shared, own = checkpoint.part("model"), checkpoint.part("training"), _own_rank_state(trainer, checkpoint)
    _check_model(trainer.model, model)
    if shared["schedule"] != type(trainer.scheduler).__name__:
        raise CheckpointError(
            f"the checkpoint's scheduler is a {shared['schedule']}, not a {type(trainer.scheduler).__name__}",
            remedy="build the trainer as it was built when the checkpoint was saved",
        )
    optimizer = _torch_optimizer_state(trainer.model, trainer.optimizer, shared["optimizer"])
    if own["micro"] and own["accumulate"] != trainer.accumulate:
        raise CheckpointError(
            f"the checkpoint was saved within a window of {own['accumulate']} micro-batches, "
            f"and this trainer accumulates {trainer.accumulate}",
            remedy=f"resume with accumulate={own['accumulate']}, or from a checkpoint saved between two windows",
        )
    left = _restore_small_states(trainer, shared, own["rng"])
    trainer.optimizer.load_state_dict(optimizer)
    _lay_out_as_parameters(trainer.optimizer)
    trainer.model.load_state_dict(model)
    with torch.no_grad():
        for name, buffer in trainer.model.named_buffers():
            if name in own["buffers"]:
                buffer.copy_(own["buffers"][name])
    trainer.steps = checkpoint.manifest["steps"]
    trainer._restart(own["micro"], own["gradients"])
    for name, position in own["feeds"].items():
        trainer._feed(name).load_state_dict(position)
    if left:
        logger.warning("random states that this device or process has no generator for: %s", ", ".join(left))
    trainer._backend.collectives.barrier()


def _restore_small_states(trainer: Trainer, shared: dict[str, Any], rng: dict[str, Tensor]) -> list[str]:
    """Scaler, schedule and random states; where one refuses, all are as they were."""
    runtime, scheduler = trainer._backend.runtime, trainer.scheduler
    scaler_before, rng_before = trainer.scaler.state_dict(), runtime.rng_state()
    schedule_before = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    try:
        trainer.scaler.load_state_dict(shared["scaler"])
        if scheduler is not None:
            scheduler.load_state_dict(shared["scheduler"])
        return runtime.set_rng_state(rng) if rng else []
    except Exception as error:
        trainer.scaler.load_state_dict(scaler_before)
        runtime.set_rng_state(rng_before)
        if scheduler is not None and schedule_before is not None:
            scheduler.load_state_dict(schedule_before)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("the checkpoint does not fit this trainer", why=repr(error)) from error


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give state the strides of its parameter: files hold it dense, and a fused kernel walks both alike."""
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _own_rank_state(trainer: Trainer, checkpoint: store.Checkpoint) -> dict[str, Any]:
    collectives = trainer._backend.collectives
    saved_by = checkpoint.manifest["world_size"]
    if saved_by == collectives.world_size:
        state: dict[str, Any] = checkpoint.part(f"rank-{collectives.rank:05d}")
        return state
    state = checkpoint.part("rank-00000")
    if state["micro"] or any(position["taken"] for position in state["feeds"].values()):
        raise CheckpointError(
            f"the checkpoint was saved in mid-epoch by a job of {saved_by}, this is a job of {collectives.world_size}",
            why="the part of the data that was seen cannot be shared out among another number of ranks",
            remedy=f"resume in a job of {saved_by}, or from a checkpoint saved at the end of an epoch",
        )
    if collectives.rank == 0:
        logger.warning(
            "the checkpoint was saved by a job of %d, this is a job of %d: random states are not restored",
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
        options["lr"] = float(options["lr"])  # a tensor where steps are captured
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
        own_options = {key: value for key, value in live.items() if key not in (*_ROUTE_SWITCHES, "params")}
        foreign = set(theirs) - {"params"} - set(own_options)
        kind = "decoupled_weight_decay"  # what tells Adam from AdamW
        if set(theirs["params"]) != set(members) or foreign or theirs.get(kind) != own_options.get(kind):
            raise CheckpointError(
                f"the checkpoint is of another optimizer: parameter group {number} differs",
                why=f"{len(members)} parameters with {sorted(own_options)} here, "
                f"{len(theirs['params'])} with {sorted(set(theirs) - {'params'})} there",
                remedy="build the optimizer as it was when the checkpoint was saved",
            )
        missing = sorted(set(own_options) - set(theirs))
        if missing:  # options that another version of torch did not have
            logger.warning("the checkpoint's optimizer has no %s: they stay as they are here", ", ".join(missing))
        for name in members:
            numbers[name] = len(numbers)
        switches = {key: live[key] for key in _ROUTE_SWITCHES if key in live}
        if isinstance(live["lr"], Tensor):
            theirs = {**theirs, "lr": torch.full_like(live["lr"], theirs["lr"])}
        groups.append({**own_options, **theirs, **switches, "params": [numbers[name] for name in members]})
    if len(saved["groups"]) != len(groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(saved['groups'])} parameter groups, this one {len(groups)}"
        )
    return {"state": {numbers[name]: entry for name, entry in saved["state"].items()}, "param_groups": groups}
