"""Saving and restoring a training, on all ranks together.

To restore, every rank first reads, checks and converts everything and changes nothing. If all ranks succeed, all
commit. A commit only fails in the user's own code, such as a hook. The trainers then refuse to train, on every rank.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore.checkpoint import store
from accelcore.checkpoint.manifest import MODEL, RANK, file_of
from accelcore.errors import CheckpointError, ConfigurationError
from accelcore.training.agreement import Agreement
from accelcore.training.saving.foreign import prepare_foreign
from accelcore.training.saving.part import Part, Saved, as_dict
from accelcore.util.text import is_number, is_whole
from accelcore.util.trial import requested_trial

if TYPE_CHECKING:
    from accelcore.backend import Backend
    from accelcore.training.saving.saver import Saver

__all__ = ["TrainingState", "load", "resume", "save"]

logger = logging.getLogger("accelcore")

_SHARED = "training"
"""File of the state that all ranks share, except for the model."""


@dataclass(frozen=True)
class TrainingState:
    """One trainer's share of a checkpoint.

    Attributes:
        saver: the trainer's saver.
        parts: every kind of state, in the order in which they are restored.
        steps: windows closed so far.
        sharded: the parameters that are divided among the ranks, by name.
    """

    saver: Saver
    parts: Sequence[Part]
    steps: int
    sharded: Mapping[str, Tensor]


Trainings = Mapping[str, TrainingState]
"""Trainings of one checkpoint by the trainers' names; a trainer that is saved alone has the name ""."""


def save(trainings: Trainings, folder: Path, *, run: str, keep: int | None, best: Any = None) -> Path:
    """Write a new checkpoint; see `Trainer.save`. `run` identifies the checkpoints of this run.

    A trial of `accelcore advise` writes nothing: it must not replace what the user has trained.
    """
    if keep is not None and not is_whole(keep, 1):
        raise ConfigurationError(f"keep={keep!r} is not a number of checkpoints", remedy="give 1 or more, or None")
    metric = None if best is None else _metric(best)
    if requested_trial() is not None:
        return folder
    backend, agreement = _agreement(trainings)
    agreement.meet("trainer.save()")
    _agree_on_metric(metric, agreement)
    rank, number, doing = backend.collectives.rank, 0, "save its files of the checkpoint"
    trainers = {name: training.steps for name, training in trainings.items()}
    steps = max(trainers.values())
    facts = {
        "run": run,
        "metric": metric if metric is None or math.isfinite(metric) else None,
        "trainers": trainers,
        "world_size": backend.collectives.world_size,
        "device": backend.name,
        "accelcore": version("accelcore"),
        "torch": torch.__version__,
    }
    with ExitStack() as held:
        with agreement.together(doing), store.writing(folder):
            if rank == 0:
                held.enter_context(store.alone(folder))
        with agreement.together(doing), store.writing(folder):
            for name, training in trainings.items():
                _write(training, folder, name, rank)
        with agreement.together(doing), store.writing(folder):
            if rank == 0:
                number = store.finish(folder, steps, facts)
    path = store.path_of(folder, steps, agreement.of_rank_0(number))
    if rank == 0 and keep is not None:
        try:
            if others := store.keep_newest(path, keep):
                logger.warning("%s also has checkpoints of another run, such as %s", folder, others[-1].name)
        except OSError as error:  # the new checkpoint is saved
            logger.warning("%s is saved, but older checkpoints could not be deleted: %s", path, error)
    return path


def _metric(given: Any) -> float:
    """Return a metric as a number; raise ConfigurationError for anything else."""
    if not is_number(value := given.item() if isinstance(given, Tensor) and given.numel() == 1 else given):
        raise ConfigurationError(
            f"best={given!r} is not a number", remedy="give the metric of this checkpoint, of which the lowest is best"
        )
    if not math.isfinite(value):
        logger.warning("the metric of this checkpoint is %s, so that it will not be the best", value)
    return float(value)


def _agree_on_metric(metric: float | None, agreement: Agreement) -> None:
    """Raise ConfigurationError on every rank if the ranks give different metrics."""
    if not agreement.all_equal(int.from_bytes(hashlib.sha256(repr(metric).encode()).digest()[:7], "big")):
        raise ConfigurationError(
            f"the ranks of this job give different metrics as best=: this one gives {metric}",
            remedy="give all ranks the same: trainer.evaluate(loader).mean(...), or job.mean(...)",
        )


def resume(
    trainings: Trainings, folder: Path, *, best: bool = False, must_exist: bool = False
) -> store.Checkpoint | None:
    """Restore a checkpoint and return it, or None if `folder` has none; see `Trainer.resume`."""
    if requested_trial() is not None and not must_exist:
        return None
    backend, agreement = _agreement(trainings)
    agreement.meet("trainer.resume()")
    rank, world_size = backend.collectives.rank, backend.collectives.world_size
    checkpoint, commits = None, {}
    with agreement.together("resume"), _as_checkpoint_error(folder):
        checkpoint = store.find(folder, (rank, world_size), best=best)
        if checkpoint is not None:
            _check_trainers(trainings, checkpoint)
            for name, training in trainings.items():
                saved = _read(checkpoint, name, rank, world_size, training.sharded)
                commits[name] = [part.prepare(saved) for part in training.parts]
    if not agreement.all_equal(0 if checkpoint is None else checkpoint.fingerprint):
        raise CheckpointError(
            f"the ranks do not find the same checkpoint in {folder}",
            why="this rank finds " + ("none" if checkpoint is None else checkpoint.path.name),
            remedy="give all ranks one folder that all of them see",
        )
    if checkpoint is not None:
        _commit(trainings, commits, checkpoint.manifest["trainers"], agreement)
        if rank == 0:
            at = "; ".join(f"{name} {training.saver.position}".lstrip() for name, training in trainings.items())
            logger.warning("resumed from %s: %s", checkpoint.path, at)
    elif must_exist:
        raise CheckpointError(
            f"there is no checkpoint in {folder}",
            available=store.beneath(folder),
            remedy="give the folder of an earlier save, or leave must_exist out",
        )
    elif rank == 0:
        logger.warning("there is no checkpoint in %s: training starts at the beginning", folder.absolute())
    return checkpoint


def load(training: TrainingState, path: Path) -> dict[str, Any]:
    """Restore what another program saved of a model and its optimizer; see `Trainer.load`."""
    _, agreement = _agreement({"": training})
    agreement.meet("trainer.load()")
    commits: Sequence[Callable[[], object]] = []
    rest: dict[str, Any] = {}
    with agreement.together("load"), _as_checkpoint_error(path):
        commits, rest = prepare_foreign(training.parts, path)
    _commit({"": training}, {"": commits}, {"": training.steps}, agreement)
    return rest


def _commit(
    trainings: Trainings,
    commits: Mapping[str, Sequence[Callable[[], object]]],
    steps: Mapping[str, int],
    agreement: Agreement,
) -> None:
    """Restore all parts by their commits. If that fails on one rank, the trainers give up on every rank."""
    failure: BaseException | None = None
    try:
        for name, training in trainings.items():
            training.saver.step.acquire_gradients()
            for commit in commits[name]:
                commit()
            training.saver.restored(steps[name])
    except BaseException as error:  # noqa: BLE001  # raised again when all ranks know
        failure = error
    try:
        agreement.settle(failure, "restore its state")
    except BaseException as error:
        for training in trainings.values():
            training.saver.give_up(error)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            "a checkpoint was restored in part",
            why=repr(error),
            remedy="create the model, optimizer and trainer again: this trainer no longer trains",
        ) from error


def _write(training: TrainingState, folder: Path, name: str, rank: int) -> None:
    """Write this rank's files of one trainer."""
    training.saver.step.acquire_gradients()
    training.saver.step.finite.check(training.steps, agree=False)
    if rank == 0 or training.sharded:
        shared = {part.name: state for part in training.parts if (state := part.state()) is not None}
        store.write_file(folder, file_of(name, MODEL), shared.pop(MODEL), rank=rank)
        store.write_file(folder, file_of(name, _SHARED), shared, rank=rank)
    own = {part.name: state for part in training.parts if (state := part.own_state()) is not None}
    store.write_file(folder, file_of(name, f"{RANK}{rank:05d}"), own)


def _read(
    checkpoint: store.Checkpoint, trainer: str, rank: int, world_size: int, sharded: Mapping[str, Tensor]
) -> Saved:
    """Read the state of one trainer that this rank needs."""
    saved_by = checkpoint.manifest["world_size"]
    same_job, like_of = saved_by == world_size, partial(_like_of, sharded)
    of_ranks = [file_of(trainer, f"{RANK}{number:05d}") for number in range(saved_by)]
    model = as_dict(checkpoint.read(file_of(trainer, MODEL), like_of), "model")
    shared = as_dict(checkpoint.read(file_of(trainer, _SHARED), like_of), "training state")
    own = as_dict(checkpoint.read(of_ranks[rank if same_job else 0]), "state of this rank")
    if "state" not in (optimizer := as_dict(shared.get("optimizer"), "optimizer state")):
        optimizer["state"] = {}
        for file in of_ranks:  # each rank saved the state of the parameters that it updates
            divided = as_dict(checkpoint.read(file, like_of), file, "optimizer")["optimizer"]
            optimizer["state"] |= as_dict(as_dict(divided, "optimizer state", "state")["state"], "optimizer state")
    if not same_job:
        positions = as_dict(own.get("data"), "positions in the data").values()
        within = as_dict(own.get("window"), "window", "micro")["micro"]
        if within or any(as_dict(position, "position", "taken")["taken"] for position in positions):
            raise CheckpointError(
                f"the checkpoint was saved within an epoch by a job of {saved_by}, this is a job of {world_size}",
                remedy=f"resume in a job of {saved_by}, or from a checkpoint saved at the end of an epoch",
            )
        if rank == 0:
            text = "the checkpoint was saved by a job of %d, this is a job of %d: random states are not restored"
            logger.warning(text, saved_by, world_size)
    return Saved(model, shared, own, same_job)


def _like_of(sharded: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor | None:
    """Return the sharded parameter that a stored tensor of this shape belongs to, or None."""
    if name.startswith("optimizer.state."):
        name = name.removeprefix("optimizer.state.").rpartition(".")[0]
    parameter = sharded.get(name.removeprefix("masters."))
    return parameter if parameter is not None and parameter.shape == shape else None


def _check_trainers(trainings: Trainings, checkpoint: store.Checkpoint) -> None:
    saved = checkpoint.manifest["trainers"]
    if saved.keys() == trainings.keys():
        return
    contains, resuming = (
        "one trainer alone" if "" in names else "the trainers " + ", ".join(sorted(names)) + " together"
        for names in (saved, trainings)
    )
    raise CheckpointError(
        f"the checkpoint {checkpoint.path} contains {contains}, but you are resuming {resuming}",
        remedy="resume it as it was saved: by trainer.resume(...), or by accelcore.Together(...) with the same names",
    )


def _agreement(trainings: Trainings) -> tuple[Backend, Agreement]:
    """Return the backend that all these trainers share, and the agreement of its job."""
    backend = next(iter(trainings.values())).saver.backend
    return backend, Agreement(backend.collectives, backend.device)


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert any other error of a file or a state to a CheckpointError."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} cannot be restored",
            why=repr(error),
            remedy="give another checkpoint, or build model and optimizer as they were when it was saved",
        ) from error
