"""Saving and resuming trainers, one or several together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from torch import Tensor

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError
from accelcore.scaling.contract import LossScaler
from accelcore.training.data.data_stream import DataStreams
from accelcore.training.model_changes import ModelSnapshot
from accelcore.training.plan import Plan
from accelcore.training.saving import progress
from accelcore.training.saving.model import MastersPart, ModelPart
from accelcore.training.saving.optimizer import OptimizerPart
from accelcore.training.saving.part import Part
from accelcore.training.saving.transaction import TrainingState, load, resume, save
from accelcore.training.schedule import Schedule
from accelcore.training.step import Step
from accelcore.training.window import Window
from accelcore.util.text import kind_of

__all__ = ["Saver", "Together"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Saver:
    """Save and restore one trainer.

    `step` and `snapshot` are set by the trainer whenever it is prepared. `run` identifies the checkpoints of this run.
    """

    step: Step
    snapshot: ModelSnapshot

    def __init__(
        self, plan: Plan, *, scaler: LossScaler, schedule: Schedule, streams: DataStreams, window: Window
    ) -> None:
        self._plan, self._scaler, self._schedule, self._streams, self._window = plan, scaler, schedule, streams, window
        self.backend, self.run = plan.backend, uuid4().hex
        self.extra: dict[str, Any] = {}

    def save(self, folder: str | Path, *, keep: int | None, best: Any, extra: Mapping[str, Any] | None) -> Path:
        """Save a checkpoint; see `Trainer.save`."""
        new = _extra(extra, self.extra)
        path = save({"": self.state(new)}, as_path(folder), run=self.run, keep=keep, best=best)
        self.extra = new
        return path

    def resume(self, folder: str | Path, *, best: bool = False, must_exist: bool = False) -> Path | None:
        """Restore a checkpoint; see `Trainer.resume`."""
        found = resume({"": self.state()}, as_path(folder), best=best, must_exist=must_exist)
        if found is None:
            return None
        self.run = found.manifest["run"]
        return found.path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a file of another program; see `Trainer.load`."""
        return load(self.state(), as_path(path))

    @property
    def position(self) -> str:
        """Where the training is, for messages."""
        return f"step {self._window.steps}, epoch {self._streams['train'].epoch}"

    def state(self, extra: dict[str, Any] | None = None) -> TrainingState:
        """Return the state of this trainer: to write it with `extra`, or without `extra` to restore it."""
        self.step.check()
        self.snapshot.check_model()
        self._streams.warn_if_unused(self._window.steps, saves=extra is not None)
        self._streams.end_epochs()
        if extra is not None:
            self._schedule.check()
        plan, divided = self._plan, self._plan.strategy.layout == "shards"
        return TrainingState(
            saver=self,
            parts=self._parts(self.extra if extra is None else extra),
            steps=self._window.steps,
            sharded=dict(plan.model.named_parameters(remove_duplicate=False)) if divided else {},
        )

    def _parts(self, extra: dict[str, Any]) -> list[Part]:
        """Return the parts in the order in which they are restored. A new kind of state is one more of these."""
        plan, runtime = self._plan, self.backend.runtime
        model, gradients = plan.model, plan.gradients
        model_part = ModelPart(model, gradients)
        return [
            model_part,
            MastersPart(model_part, gradients),
            progress.SchedulePart(self._schedule),
            OptimizerPart(model, plan.optimizer, gradients, plan.strategy),
            progress.ScalerPart(self._scaler),
            progress.WindowPart(model, self._window, gradients),
            progress.DataStreamsPart(self._streams, runtime),
            progress.ExtraPart(extra),
            progress.RandomPart(runtime),
        ]

    def restored(self, steps: int) -> None:
        """Continue after `steps` windows, when all parts are restored."""
        self._window.steps = steps
        if self._plan.captured is not None:
            self._plan.captured.forget()
        self._schedule.restored(self._streams["train"].epoch)
        self.step.begin(opened=self._window.micro > 0)
        self.step.finite.begin(steps)

    def give_up(self, error: BaseException) -> None:
        """Let the trainer train no more, because `error` left its state restored in part."""
        self.step.give_up(
            "a checkpoint was restored in part",
            "make model, optimizer and trainer again, and resume; in a job, on all ranks",
            error,
        )


class _Trainer(Protocol):
    @property
    def saver(self) -> Saver: ...


class Together:
    """Save and resume several trainers as one, such as the two of a GAN.

    Example::

        both = accelcore.Together(generator=train_g, discriminator=train_d)
        both.resume("outputs/gan")
        ...
        both.save("outputs/gan", keep=2)

    A checkpoint holds all of the trainers. Either all of them are restored, or none.

    Args:
        trainers: trainers of one job, by name. Each trainer has a folder of its name in a checkpoint.

    Attributes:
        extra: the dict last given to `save(extra=...)` or read by `resume`; each checkpoint holds it.

    Raises:
        ConfigurationError: a value is not a trainer, a trainer has two names, a name cannot be a folder's name, or the
            trainers are of different jobs.
    """

    def __init__(self, *unnamed: _Trainer, **trainers: _Trainer) -> None:
        remedy = "give trainers by name: accelcore.Together(generator=train_g, discriminator=train_d)"
        if unnamed:
            raise ConfigurationError("trainers that are saved together need names", remedy=remedy)
        if not trainers:
            raise ConfigurationError("there are no trainers to save together", remedy=remedy)
        for name, trainer in trainers.items():
            if not isinstance(getattr(trainer, "saver", None), Saver):
                raise ConfigurationError(f"{name} is {kind_of(trainer)}, not a trainer", remedy=remedy)
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"{name!r} cannot be a trainer's name, which becomes the name of a folder",
                    remedy="begin with a letter from a to z, followed by letters, digits and _",
                )
        if len({name.lower() for name in trainers}) < len(trainers):  # for some file systems they are the same
            raise ConfigurationError(f"some of the names {', '.join(trainers)} differ in case only", remedy=remedy)
        if len(set(map(id, trainers.values()))) < len(trainers):
            raise ConfigurationError("one trainer is given under two names", remedy="give each trainer once")
        self._savers = {name: trainer.saver for name, trainer in trainers.items()}
        # Trainers that disagree on this process's rank would overwrite each other's files.
        jobs = {name: saver.backend.collectives for name, saver in self._savers.items()}
        places = {name: f"rank {job.rank} of {job.world_size}" for name, job in jobs.items()}
        if len(set(places.values())) > 1:
            where = ", ".join(f"{place} to {name}" for name, place in places.items())
            raise ConfigurationError(
                f"trainers of different jobs cannot be saved together: this process is {where}",
                remedy="make all of them by one `accel`, after it has joined the job",
            )
        self._run = uuid4().hex
        self.extra: dict[str, Any] = {}

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        best: float | Tensor | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save all trainers as one new checkpoint, named by the largest number of steps; see `Trainer.save`.

        `extra` is saved beside the trainers' own `extra`, and becomes `extra` of this object.
        """
        new = _extra(extra, self.extra)
        states = {name: saver.state(saver.extra) for name, saver in self._savers.items()}
        path = save(_with_extra(states, new), as_path(folder), run=self._run, keep=keep, best=best)
        self.extra = new
        return path

    def resume(self, folder: str | Path, *, best: bool = False, must_exist: bool = False) -> Path | None:
        """Resume all trainers from the newest checkpoint in `folder`, or from `folder` if it is a checkpoint.

        Args:
            folder, best, must_exist: as for `Trainer.resume`.

        Returns:
            The checkpoint, or None if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged, does not fit a trainer, or holds other trainers; or there is
                none and it must exist. It is raised on all ranks, and all trainers are unchanged. If a hook or class of
                yours raises while the state is restored, none of the trainers can train any more.
        """
        states = {name: saver.state() for name, saver in self._savers.items()}
        found = resume(_with_extra(states, self.extra), as_path(folder), best=best, must_exist=must_exist)
        if found is None:
            return None
        self._run = found.manifest["run"]
        return found.path


def _extra(given: Mapping[str, Any] | None, before: dict[str, Any]) -> dict[str, Any]:
    extra = before if given is None else given
    if not isinstance(extra, Mapping):
        raise ConfigurationError(f"extra={extra!r} is not a dict", remedy='name what you save: extra={"best": 0.5}')
    return before if given is None else dict(given)


def _with_extra(states: Mapping[str, TrainingState], extra: dict[str, Any]) -> dict[str, TrainingState]:
    """Return the states with what `Together` saves itself, which one of them keeps."""
    keeper = min(states)  # the same in whichever order the trainers are given
    parts = [*states[keeper].parts, progress.ExtraPart(extra, "together")]
    return {**states, keeper: replace(states[keeper], parts=parts)}
