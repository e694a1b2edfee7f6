"""Saving and restoring a training: in two phases, on all ranks together, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelcore.checkpoint import store
from accelcore.checkpoint.finding import find
from accelcore.checkpoint.tensors import Layout
from accelcore.errors import CheckpointError, ConfigurationError
from accelcore.roles.composition import Roles
from accelcore.training.agreement import Agreement
from accelcore.training.parts.foreign import prepare_foreign
from accelcore.training.parts.part import Change, Part, Saved, table

__all__ = ["TrainingState", "load", "resume", "save"]

logger = logging.getLogger("accelcore")

_MODEL, _SHARED = "model", "training"
_OF_OPTIMIZER, _OF_MASTERS = ("optimizer.state.", "updates."), "masters."


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint is made of.

    Attributes:
        backend: where the training runs; it knows the job.
        parts: every kind of state; the model's has a file of its own.
        run: tells this run's checkpoints from another's in the same folder.
        sharded: by name, the parameters that are divided among the ranks.
    """

    backend: Roles
    parts: Sequence[Part]
    run: str
    sharded: Mapping[str, Tensor] = field(default_factory=dict)


def save(training: TrainingState, folder: Path, *, steps: int, keep: int | None) -> Path:
    """Write a new checkpoint; see `Trainer.save`."""
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigurationError(
            f"keep={keep!r} is not a number of checkpoints", remedy="give a whole number, 1 or more, or None"
        )
    agreement = _agreement(training)
    agreement.meet("trainer.save()")
    rank, number, doing = training.backend.collectives.rank, 0, "save its part of the checkpoint"
    try:
        with ExitStack() as held:
            with agreement.together(doing):
                if rank == 0:
                    with store.writing(folder):
                        held.enter_context(store.alone(folder))
                        store.begin(folder)
            with agreement.together(doing), store.writing(folder):
                if rank == 0 or training.sharded:
                    shared = _states(training, "shared")
                    store.write_part(folder, _MODEL, shared.pop(_MODEL), rank=rank)
                    store.write_part(folder, _SHARED, shared, rank=rank)
                store.write_part(folder, _rank_file(rank), _states(training, "rank"))
            with agreement.together(doing):
                if rank == 0:
                    with store.writing(folder):
                        number = store.finish(folder, steps, _facts(training))
    except BaseException:
        if rank == 0:
            store.clear(folder)
        raise
    path = store.path_of(folder, steps, agreement.of_rank_0(number))
    if rank == 0 and keep is not None:
        _prune(path, keep)
    return path


def resume(training: TrainingState, folder: Path) -> tuple[Path, int, str] | None:
    """Go on from a checkpoint; see `Trainer.resume`.

    Returns:
        The checkpoint, its steps and its run; None where there is none.
    """
    agreement = _agreement(training)
    agreement.meet("trainer.resume()")
    failure: Exception | None = None
    checkpoint, changes = None, []
    try:
        checkpoint = find(folder, (training.backend.collectives.rank, training.backend.collectives.world_size))
        if checkpoint is not None:
            saved = _read(training, checkpoint)
            changes = [part.prepare(saved) for part in training.parts]
    except Exception as error:  # noqa: BLE001  # raised again when all ranks know
        failure = _as_checkpoint_error(error, folder)
    agreement.settle(failure, "resume")
    if not agreement.all_equal(0 if checkpoint is None else checkpoint.fingerprint):
        raise CheckpointError(
            f"the ranks do not find the same checkpoint in {folder}",
            why="here it is " + ("none" if checkpoint is None else checkpoint.path.name),
            remedy="give all ranks one folder that all of them see",
        )
    if checkpoint is None:
        return None
    _commit(changes, agreement, folder)
    agreement.meet("trainer.resume()")
    return checkpoint.path, checkpoint.manifest["steps"], str(checkpoint.manifest.get("run", training.run))


def load(training: TrainingState, path: Path) -> dict[str, Any]:
    """Take over what another program has saved of a model and its optimizer; see `Trainer.load`."""
    agreement = _agreement(training)
    agreement.meet("trainer.load()")
    failure: Exception | None = None
    changes: list[Change] = []
    rest: dict[str, Any] = {}
    try:
        changes, rest = prepare_foreign(training.parts, path)
    except Exception as error:  # noqa: BLE001  # raised again when all ranks know
        failure = _as_checkpoint_error(error, path)
    agreement.settle(failure, "load")
    _commit(changes, agreement, path)
    return rest


def _commit(changes: Sequence[Change], agreement: Agreement, folder: Path) -> None:
    """First what may still refuse, with a way back; when it has succeeded on all ranks, the rest."""
    begun: list[Change] = []
    try:
        with agreement.together("resume"):
            try:
                for change in changes:
                    if change.undo is not None:
                        begun.append(change)
                        change.commit()
            except Exception as error:
                raise _as_checkpoint_error(error, folder) from error
    except CheckpointError:
        for change in reversed(begun):
            assert change.undo is not None
            change.undo()
        raise
    for change in changes:
        if change.undo is None:
            change.commit()


def _read(training: TrainingState, checkpoint: store.Checkpoint) -> Saved:
    collectives, saved_by = training.backend.collectives, checkpoint.manifest["world_size"]
    same_job = saved_by == collectives.world_size
    layout = partial(_layout, training.sharded)
    model = table(checkpoint.part(_MODEL, layout), "model")
    shared = table(checkpoint.part(_SHARED, layout), "training state")
    own = table(checkpoint.part(_rank_file(collectives.rank if same_job else 0)), "state of this rank")
    if "state" not in (optimizer := table(shared.get("optimizer"), "optimizer state")):
        optimizer["state"] = _of_all_ranks(checkpoint, saved_by, layout)
    if checkpoint.manifest["format"] == 1:
        shared, own = _of_format_1(shared, own)
    if not same_job:
        positions = table(own.get("feeds"), "places in the data").values()
        within = table(own.get("window"), "window", "micro")["micro"]
        if within or any(table(position, "place", "taken")["taken"] for position in positions):
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch by a job of {saved_by}, this is a job of "
                f"{collectives.world_size}",
                why="the part of the data that was seen cannot be shared out among another number of ranks",
                remedy=f"resume in a job of {saved_by}, or from a checkpoint saved at the end of an epoch",
            )
        if collectives.rank == 0:
            logger.warning(
                "the checkpoint was saved by a job of %d, this is a job of %d: random states are not restored",
                saved_by,
                collectives.world_size,
            )
    return Saved(model, shared, own, same_job)


def _of_all_ranks(checkpoint: store.Checkpoint, count: int, layout: Layout) -> dict[str, Any]:
    """The optimizer's state of what each rank has updated, put together."""
    state: dict[str, Any] = {}
    for rank in range(count):
        saved = table(checkpoint.part(_rank_file(rank), layout), "state of a rank")
        state |= table(saved.get("updates"), "optimizer state of a rank")
    return state


def _layout(sharded: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor | None:
    """The parameter that a stored tensor belongs to, where that is divided and the tensor is of its shape."""
    for prefix in _OF_OPTIMIZER:
        if name.startswith(prefix):
            name = name.removeprefix(prefix).rpartition(".")[0]
    parameter = sharded.get(name.removeprefix(_OF_MASTERS))
    return parameter if parameter is not None and parameter.shape == shape else None


def _of_format_1(shared: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a checkpoint that was written before parts had names."""
    table(shared, "training state", "optimizer", "schedule", "scheduler", "scaler")
    table(own, "state of this rank", "buffers", "rng", "feeds", "micro", "accumulate", "gradients")
    schedule = {"kind": shared["schedule"], "state": shared["scheduler"]}
    window = {key: own[key] for key in ("micro", "accumulate", "gradients", "buffers")}
    return (
        {"optimizer": shared["optimizer"], "scaler": shared["scaler"], "schedule": schedule},
        {"window": window, "feeds": own["feeds"], "random": own["rng"]},
    )


def _prune(path: Path, keep: int) -> None:
    """Delete older checkpoints of this run. What cannot be deleted is no reason to say that nothing was saved."""
    try:
        others = store.keep_newest(path, keep)
    except OSError as error:
        logger.warning("%s is saved, and older checkpoints could not be deleted: %s", path, error)
        return
    if others:
        logger.warning("%s also holds another run's checkpoints, such as %s", path.parent, others[-1].name)


def _states(training: TrainingState, scope: str) -> dict[str, Any]:
    return {part.name: part.state() for part in training.parts if part.scope == scope}


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}"


def _facts(training: TrainingState) -> dict[str, Any]:
    return {
        "run": training.run,
        "world_size": training.backend.collectives.world_size,
        "device": training.backend.name,
        "accelcore": version("accelcore"),
        "torch": torch.__version__,
    }


def _agreement(training: TrainingState) -> Agreement:
    return Agreement(training.backend.collectives, training.backend.device)


def _as_checkpoint_error(error: Exception, folder: Path) -> Exception:
    """What state of another's making can raise, as an error of the family."""
    if isinstance(error, CheckpointError | ConfigurationError):
        return error
    refused = CheckpointError(f"a checkpoint in {folder} does not fit this trainer", why=repr(error))
    refused.__cause__ = error
    return refused
