"""Saving and restoring a training: in two phases, on all ranks together, all of it or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelcore.backend import Backend
from accelcore.checkpoint import store
from accelcore.checkpoint.finding import find
from accelcore.checkpoint.manifest import MODEL, file_of
from accelcore.errors import CheckpointError, ConfigurationError
from accelcore.training.agreement import Agreement
from accelcore.training.checkpoint_files import SHARED, of_rank, read_saved
from accelcore.training.parts.foreign import prepare_foreign
from accelcore.training.parts.part import Change, Part
from accelcore.wording import is_whole

__all__ = ["Resumed", "TrainingState", "load", "resume", "save"]

logger = logging.getLogger("accelcore")


@dataclass(frozen=True)
class TrainingState:
    """One trainer's part of a checkpoint.

    Attributes:
        backend: where the training runs; it knows the job.
        parts: every kind of state; the model's has a file of its own.
        steps: windows closed so far.
        take_turn: sees that the gradients on the parameters are this training's.
        restored: is called when the parts were written to.
        give_up: is called, with the reason, when they were written to in part, and that could not be undone.
        sharded: by name, the parameters that are divided among the ranks.
    """

    backend: Backend
    parts: Sequence[Part]
    steps: int
    take_turn: Callable[[], None]
    restored: Callable[[], None]
    give_up: Callable[[BaseException], None]
    sharded: Mapping[str, Tensor] = field(default_factory=dict)


Trainings = Mapping[str, TrainingState]
"""What one checkpoint holds, by the trainers' names; "" is the name of one that is saved alone."""


_Changes = Sequence[tuple[TrainingState, Sequence[Change]]]
"""Of each training, how its parts are restored."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a training goes on from.

    Attributes:
        path: its folder.
        steps: of each trainer, by name.
        run: which run saved it.
    """

    path: Path
    steps: Mapping[str, int]
    run: str


def save(trainings: Trainings, folder: Path, *, run: str, keep: int | None) -> Path:
    """Write a new checkpoint; see `Trainer.save`.

    Args:
        run: tells this run's checkpoints from another's in the same folder.
    """
    if keep is not None and not is_whole(keep, 1):
        raise ConfigurationError(
            f"keep={keep!r} is not a number of checkpoints", remedy="give a whole number, 1 or more, or None"
        )
    backend, agreement = _agreement(trainings)
    agreement.meet("trainer.save()")
    rank, number, doing = backend.collectives.rank, 0, "save its part of the checkpoint"
    steps = max(training.steps for training in trainings.values())
    try:
        with ExitStack() as held:
            with agreement.together(doing):
                if rank == 0:
                    with store.writing(folder):
                        held.enter_context(store.alone(folder))
                        store.begin(folder)
            with agreement.together(doing), store.writing(folder):
                for name, training in trainings.items():
                    _write(training, folder, name, rank)
            with agreement.together(doing):
                if rank == 0:
                    with store.writing(folder):
                        number = store.finish(folder, steps, _facts(backend, trainings, run))
    except BaseException:
        if rank == 0:
            store.clear(folder)
        raise
    path = store.path_of(folder, steps, agreement.of_rank_0(number))
    if rank == 0 and keep is not None:
        _prune(path, keep)
    return path


def resume(trainings: Trainings, folder: Path) -> Resumed | None:
    """Go on from a checkpoint; see `Trainer.resume`. None where there is none."""
    backend, agreement = _agreement(trainings)
    agreement.meet("trainer.resume()")
    failure: Exception | None = None
    checkpoint, steps, changes = None, {}, []
    try:
        checkpoint = find(folder, (backend.collectives.rank, backend.collectives.world_size))
        if checkpoint is not None:
            steps = _steps_of(trainings, checkpoint)
            for name, training in trainings.items():
                saved = read_saved(checkpoint, name, training.backend.collectives, training.sharded)
                changes.append((training, [part.prepare(saved) for part in training.parts]))
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
    _commit(changes, agreement, folder, "resume")
    return Resumed(checkpoint.path, steps, checkpoint.manifest["run"])


def load(training: TrainingState, path: Path) -> dict[str, Any]:
    """Take over what another program has saved of a model and its optimizer; see `Trainer.load`."""
    _, agreement = _agreement({"": training})
    agreement.meet("trainer.load()")
    failure: Exception | None = None
    changes: list[Change] = []
    rest: dict[str, Any] = {}
    try:
        changes, rest = prepare_foreign(training.parts, path)
    except Exception as error:  # noqa: BLE001  # raised again when all ranks know
        failure = _as_checkpoint_error(error, path)
    agreement.settle(failure, "load")
    _commit([(training, changes)], agreement, path, "load")
    return rest


def _commit(changes: _Changes, agreement: Agreement, path: Path, doing: str) -> None:
    """Make first the changes that may still fail, and can be undone; the rest when those are made on all ranks."""
    failure: BaseException | None = None
    undo: list[Callable[[], None]] = []
    try:
        for change in chain.from_iterable(of_one for _, of_one in changes):
            if change.undo is not None:
                undo.append(change.undo)
                change.commit()
    except BaseException as error:  # noqa: BLE001  # raised again when all ranks know
        failure = _as_checkpoint_error(error, path) if isinstance(error, Exception) else error
    try:
        agreement.settle(failure, doing)
    except BaseException:
        with _wholly(changes, agreement, f"undo what it did to {doing}"):
            _call_all(reversed(undo))
        raise
    with _wholly(changes, agreement, doing):
        for training, of_one in changes:
            training.take_turn()
            for change in of_one:
                if change.undo is None:
                    change.commit()
            training.restored()


@contextmanager
def _wholly(changes: _Changes, agreement: Agreement, doing: str) -> Iterator[None]:
    """A stage that has no way back: where it fails on one rank, no trainer goes on on any."""
    try:
        with agreement.together(doing):
            yield
    except BaseException as error:
        for training, _ in changes:
            training.give_up(error)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            "a checkpoint was restored in part, and that could not be undone",
            why=repr(error),
            remedy="make model, optimizer and trainer anew: this one trains no more",
        ) from error


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    """Call each, whatever becomes of the others; raise the first error."""
    first: BaseException | None = None
    for function in functions:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised again when all were called
            first = first or error
    if first is not None:
        raise first


def _steps_of(trainings: Trainings, checkpoint: store.Checkpoint) -> dict[str, int]:
    """The steps of each trainer; raises CheckpointError where the checkpoint is of others."""
    steps: dict[str, int] = checkpoint.manifest["trainers"]
    if steps.keys() == trainings.keys():
        return steps
    saved_of, resumed_by = (
        "one trainer alone" if "" in names else "the trainers " + ", ".join(sorted(names)) + " together"
        for names in (steps, trainings)
    )
    raise CheckpointError(
        f"the checkpoint {checkpoint.path} was saved of {saved_of}, and would be resumed by {resumed_by}",
        remedy="resume it as it was saved, by trainer.resume(...) or by accelcore.Together(...).resume(...), with the "
        "same names",
    )


def _write(training: TrainingState, folder: Path, name: str, rank: int) -> None:
    """Write what this rank has to write of one trainer."""
    training.take_turn()
    if rank == 0 or training.sharded:
        shared = _states(training, "shared")
        store.write_part(folder, file_of(name, MODEL), shared.pop(MODEL), rank=rank)
        store.write_part(folder, file_of(name, SHARED), shared, rank=rank)
    store.write_part(folder, file_of(name, of_rank(rank)), _states(training, "rank"))


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


def _facts(backend: Backend, trainings: Trainings, run: str) -> dict[str, Any]:
    return {
        "run": run,
        "trainers": {name: training.steps for name, training in trainings.items()},
        "world_size": backend.collectives.world_size,
        "device": backend.name,
        "accelcore": version("accelcore"),
        "torch": torch.__version__,
    }


def _agreement(trainings: Trainings) -> tuple[Backend, Agreement]:
    """The backend and the job, which all these trainers share."""
    backend = next(iter(trainings.values())).backend
    return backend, Agreement(backend.collectives, backend.device)


def _as_checkpoint_error(error: Exception, folder: Path) -> Exception:
    """What was raised by state that somebody else has made, as an error of the family."""
    if isinstance(error, CheckpointError | ConfigurationError):
        return error
    refused = CheckpointError(f"a checkpoint in {folder} does not fit this trainer", why=repr(error))
    refused.__cause__ = error
    return refused
