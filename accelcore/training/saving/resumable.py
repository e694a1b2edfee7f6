"""Save and resume one training or several of a process as one: `Resumable`, the base of `Trainer` and `Together`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor

from accelcore.checkpoint import folders, store
from accelcore.checkpoint.manifest import MODEL, RANK, file_of
from accelcore.errors import ConfigurationError, logger, notice
from accelcore.jobs.exchange import gather_objects
from accelcore.training.agreement import all_equal, all_or_none, wait_for_all
from accelcore.training.saving.parts import SHARED, ExtraPart, Part, SchedulePart
from accelcore.training.saving.trainer_state import (
    TrainingParts,
    Trainings,
    as_checkpoint_error,
    check_position,
    check_same,
    check_trainers,
    commit,
    read_saved,
)
from accelcore.util.containers import item
from accelcore.util.text import is_number, is_whole, text_remedy


class Resumable(ABC):
    """Base of `Trainer` and `Together`: save and resume one or several trainings of a process as one.

    Attributes:
        extra: the dict last given to `save(extra=...)` or read by `resume`; each checkpoint holds it.
    """

    def __init__(self) -> None:
        self._run = uuid4().hex  # identifies the checkpoints of this run
        self.extra: dict[str, Any] = {}
        self._spared: Path | None = None
        self._told_mode = False
        self._saved_in: dict[Path, bool] = {}  # for each folder, whether a warning of another run was logged

    @abstractmethod
    def _trainings(self, extra: dict[str, Any] | None) -> Trainings:
        """Return the state of each trainer: to write it with `extra`, or without `extra` to restore it."""

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        best: float | Tensor | None = None,
        mode: Literal["min", "max"] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save a new checkpoint in `folder`, named by the number of steps, from which training resumes.

        It holds the model, the optimizer, the loss scaler, the schedule, the position in the data, random states and
        the gradients of an open window. It is written completely or not at all. In a job every rank must call this,
        with a folder that all ranks share.

        Example:
            >>> path = trainer.save("outputs/run", keep=2, best=0.25, mode="min")
            >>> path.name
            'step-00000000'

        Args:
            folder: the folder of the run's checkpoints, the same on all ranks.
            keep: delete all but the newest `keep` checkpoints of this run afterwards; None deletes nothing. The best
                one is never deleted.
            best: a metric of this checkpoint, the same on all ranks. The checkpoint with the best metric is never
                deleted. Of equal metrics the first is the best; NaN and infinity never are.
            mode: of `best`: "min" if the lowest metric is the best, as of a loss; "max" for the highest, as of an
                accuracy. The same in all saves of a run. None: "min", which the log reports once.
            extra: what else to save, such as the best score: plain values, tensors, and lists and dicts of these. It is
                then in `trainer.extra`, and later saves without `extra=` write it again. In a job rank 0's is saved.
        """
        if keep is not None and not is_whole(keep, 1):
            remedy = text_remedy(keep, whole=True) or "give 1 or more, or None"
            raise ConfigurationError(f"keep={keep!r} is not a number of checkpoints", remedy=remedy)
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigurationError(f"extra={extra!r} is not a dict", remedy='name what you save: extra={"best": 0.5}')
        new = self.extra if extra is None else dict(extra)
        metric, folder = _metric(best, mode), folders.as_path(folder)
        trainings = self._trainings(new)
        # Neither a trial nor a replay may replace what the user has trained.
        if not all(each.state.writes for each in trainings.values()):
            self.extra = new
            return folder
        backend = next(iter(trainings.values())).state.backend
        wait_for_all(backend, "trainer.save()")
        if not all_equal(backend, repr((str(folder), metric))):
            raise ConfigurationError(
                f"the ranks of this job save in different folders, or with different metrics: this one in {folder}, "
                f"with best={metric and metric[0]}, mode={mode!r}",
                remedy="give all ranks the folder that rank 0 names: job.gather_objects(folder)[0]; and a metric from "
                "trainer.evaluate(loader).mean(...), or job.mean(...)",
            )
        for training in trainings.values():
            training.state.step.check_replicas()
        rank, saved, doing = backend.collectives.rank, "", "save its files of the checkpoint"
        _warn_of_unknown_schedules([part for training in trainings.values() for part in training.parts])
        trainers = {name: training.state.steps for name, training in trainings.items()}
        steps = max(trainers.values())
        facts = {
            "run": self._run,
            "metric": metric,
            "trainers": trainers,
            "world_size": backend.collectives.world_size,
            "device": backend.name,
            "accelcore": version("accelcore"),
            "torch": torch.__version__,
        }
        with ExitStack() as held:
            with all_or_none(backend, doing), store.writing(folder):
                if rank == 0:
                    held.enter_context(store.alone(folder))
                    if metric is not None:
                        store.check_mode(folder, self._run, metric[1])
                        if mode is None and not self._told_mode:
                            self._told_mode = True
                            notice('best= without mode=: the lowest is the best; else give mode="max"')
            with all_or_none(backend, doing), store.writing(folder):
                for name, training in trainings.items():
                    _write(training, folder, name, rank)
            with all_or_none(backend, doing), store.writing(folder):
                if rank == 0:
                    saved = store.finish(folder, steps, facts)
        path: Path = folder / gather_objects(backend.collectives, saved)[0]
        for training in trainings.values():
            training.state.steps_kept = training.state.steps
        if rank == 0 and (keep is not None or folder not in self._saved_in):
            self._delete_older(path, keep)
        self.extra = new
        return path

    def _delete_older(self, path: Path, keep: int | None) -> None:
        """Delete all but the newest `keep` checkpoints of this run; log once that another run saves here, too."""
        folder = path.parent
        try:
            others = store.keep_newest(path, keep, self._spared)
        except OSError as error:  # the new checkpoint is saved
            logger.warning("%s is saved, but older checkpoints could not be deleted: %s", path, error)
            return
        if others and not self._saved_in.get(folder):
            logger.warning(
                "%s also has checkpoints of another run, or of steps that this run has left by resuming an older one, "
                "such as %s. trainer.resume(folder) takes the one of most steps: delete them, or save in another "
                "folder",
                *(folder, others[-1].name),
            )
        self._saved_in[folder] = bool(others) or self._saved_in.get(folder, False)

    def resume(self, folder: str | Path, *, best: bool = False, must_exist: bool = False) -> Path | None:
        """Resume from the newest checkpoint in `folder`, or from `folder` if it is a checkpoint.

        Example:
            >>> trainer.resume("outputs/run")  # None: there is no checkpoint yet
            >>> for epoch in trainer.epochs(5):  # the epochs that are left
            ...     for batch in trainer.batches(loader):
            ...         value = trainer(batch)
            ...     path = trainer.save("outputs/run", keep=2)

        Args:
            folder: the folder that `save` was given, or one of its checkpoints.
            best: take the checkpoint with the best metric: `save(folder, best=metric)` saves a metric.
            must_exist: whether a folder without a checkpoint is an error. Otherwise the log reports it.

        Returns:
            The checkpoint, or None if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged or belongs to another model, or there is none and it must exist.
                It is raised on all ranks, and nothing is changed. If a hook or class of yours raises while the
                state is restored, nothing can train any more, on any rank.
        """
        trainings, folder = self._trainings(None), folders.as_path(folder)
        first = next(iter(trainings.values())).state
        backend, starts_at = first.backend, first.starts_at
        if starts_at == 0 and not must_exist:
            return None
        if starts_at:
            folder = folders.after_steps(folder, starts_at)
        wait_for_all(backend, "trainer.resume()")
        rank, world_size = backend.collectives.rank, backend.collectives.world_size
        checkpoint, commits = None, {}
        with all_or_none(backend, "resume"), as_checkpoint_error(folder):
            checkpoint = store.find(folder, (rank, world_size), best=best)
            if checkpoint is not None:
                check_trainers(checkpoint, trainings)
                for name, training in trainings.items():
                    saved = read_saved(checkpoint, name, rank, world_size, training.state.sharded)
                    check_position(saved, checkpoint.manifest["world_size"], world_size)
                    commits[name] = [part.prepare(saved) for part in training.parts]
        check_same(backend, folder, checkpoint)
        if checkpoint is not None:
            states = {name: training.state for name, training in trainings.items()}
            left = {name: state.place for name, state in states.items() if state.steps > state.steps_kept}
            commit(backend, trainings, commits, checkpoint.manifest["trainers"])
            for state in states.values():
                state.steps_kept = state.steps
            if rank == 0:
                if (saved_by := checkpoint.manifest["world_size"]) != world_size:
                    text = "random states are not restored: a job of size %d saved the checkpoint, and this has size %d"
                    logger.warning(text, saved_by, world_size)
                at = "; ".join(f"{name} {training.state.place}".lstrip() for name, training in trainings.items())
                notice("resumed from %s: %s", checkpoint.path, at)
                for name, place in left.items():
                    notice("what %s has trained until %s, and not saved, is lost", name or "the trainer", place)
            self._run = checkpoint.manifest["run"]
            if any(training.state.spares_start for training in trainings.values()):
                self._spared = checkpoint.path
            return checkpoint.path
        if must_exist:
            raise folders.no_checkpoint(folder, "give the folder of an earlier save, or remove must_exist")
        if rank == 0:
            meant = folders.near(folder)
            log, hint = (logger.warning, f" (did you mean one of these? {meant})") if meant else (notice, "")
            log("there is no checkpoint in %s: training starts at step 0%s", folder.absolute(), hint)
        return None


def _metric(best: Any, mode: str | None) -> tuple[float, str] | None:
    """Return a metric and its mode, None if it is not finite; raise ConfigurationError for anything else."""
    if mode is not None and best is None:
        raise ConfigurationError(f"mode={mode!r} needs best=", remedy="give best=metric, or remove mode=")
    if mode not in [None, *store.BEST]:
        raise ConfigurationError(f"mode={mode!r} is unknown", available='"min" (the lowest is the best) or "max"')
    if best is None:
        return None
    if not is_number(value := item(best)):
        remedy = text_remedy(best) or "give the metric of this checkpoint"
        raise ConfigurationError(f"best={best!r} is not a number", remedy=remedy)
    if not math.isfinite(value):
        logger.warning("the metric of this checkpoint is %s, so that it will not be the best", value)
        return None
    return float(value), mode or "min"


def _warn_of_unknown_schedules(parts: Sequence[Part]) -> None:
    """Log that checkpoints lack a scheduler of the script, unless `extra` seems to have it."""
    kept = [str(name) for part in parts if isinstance(part, ExtraPart) for name in part.extra]
    for part in parts:
        if isinstance(part, SchedulePart) and not any("sched" in name for name in kept):
            part.schedule.warn_if_unknown()


def _write(training: TrainingParts, folder: Path, name: str, rank: int) -> None:
    """Write this rank's files of one trainer: its own state, and the shared state if it is rank 0 or has shards."""
    training.state.step.shared.acquire()
    training.state.step.finite.check(training.state.steps, agree=False)
    if rank == 0 or training.state.sharded:
        shared = {part.name: state for part in training.parts if (state := part.shared_state()) is not None}
        store.write_file(folder, file_of(name, MODEL), shared.pop(MODEL), rank=rank)
        store.write_file(folder, file_of(name, SHARED), shared, rank=rank)
    own = {part.name: state for part in training.parts if (state := part.own_state()) is not None}
    store.write_file(folder, file_of(name, f"{RANK}{rank:05d}"), own)
