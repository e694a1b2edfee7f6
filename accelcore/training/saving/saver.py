"""Saving and resuming trainers, one or several together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError
from accelcore.scaling.dynamic import LossScaler
from accelcore.training.data.data_stream import DataStreams
from accelcore.training.model_changes import ModelSnapshot
from accelcore.training.parallel.strategy import owns, sharded_parameters
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

    Attributes:
        backend: the device and the job.
        step, snapshot: the trainer's step and model snapshot. The trainer sets them whenever it is prepared.
        run: identifies the checkpoints of this run.
        extra: what else each checkpoint holds; see `Trainer.extra`.
    """

    step: Step
    snapshot: ModelSnapshot

    def __init__(
        self, plan: Plan, *, scaler: LossScaler, schedule: Schedule, streams: DataStreams, window: Window
    ) -> None:
        self._plan, self._scaler, self._schedule, self._streams, self._window = plan, scaler, schedule, streams, window
        self.backend, self.run = plan.backend, uuid4().hex
        self.extra: dict[str, Any] = {}

    def save(self, folder: str | Path, *, keep: int | None, extra: Mapping[str, Any] | None) -> Path:
        """Save a checkpoint; see `Trainer.save`."""
        with _setting_extra(self, extra):
            return save({"": self.state(saves=True)}, as_path(folder), run=self.run, keep=keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Restore a checkpoint; see `Trainer.resume`."""
        found = resume({"": self.state()}, as_path(folder))
        if found is None:
            return None
        self.resumed(found.manifest["trainers"][""])
        self.run = found.manifest["run"]
        return found.path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a file of another program; see `Trainer.load`."""
        return load(self.state(), as_path(path))

    def resumed(self, steps: int) -> None:
        """Set how many windows were closed in the checkpoint that was restored."""
        self._window.steps = steps

    def state(self, *, saves: bool = False) -> TrainingState:
        """Return what a checkpoint of this trainer holds, to write it (`saves`) or to read it.

        Raises:
            TrainingError: the trainer can no longer train, or its model or scheduler was changed.
        """
        self.step.check()
        self.snapshot.check_model()
        self._streams.warn_if_unused(self._window.steps)
        self._streams.end_epochs()
        if saves:
            self._schedule.check()
        plan = self._plan
        return TrainingState(
            backend=self.backend,
            parts=self._parts(),
            steps=self._window.steps,
            acquire_gradients=self.step.acquire_gradients,
            restored=self._restored,
            give_up=self._give_up,
            sharded=sharded_parameters(plan.strategy, plan.model),
        )

    def _parts(self) -> list[Part]:
        """Return the parts in the order in which they are restored. A new kind of state is one more of these."""
        plan, strategy, runtime = self._plan, self._plan.strategy, self.backend.runtime
        model, gradients, options = plan.model, plan.gradients, plan.options
        is_own, divided = partial(owns, strategy), strategy.owners is not None
        return [
            ModelPart(model, gradients),
            MastersPart(model, gradients),
            progress.SchedulePart(options["scheduler"], options["schedule_by"]),
            OptimizerPart(model, plan.optimizer, gradients, owns=is_own, divided=divided),
            progress.ScalerPart(self._scaler),
            progress.WindowPart(model, self._window, gradients),
            progress.DataStreamsPart(self._streams, runtime),
            progress.ExtraPart(self.extra),
            progress.RandomPart(runtime),
        ]

    def _restored(self) -> None:
        if self._plan.captured is not None:
            self._plan.captured.forget()
        self._schedule.restored(self._streams["train"].epoch)
        self.step.begin(opened=self._window.micro > 0)

    def _give_up(self, error: BaseException) -> None:
        self.step.give_up(
            "a checkpoint was restored in part",
            "make model, optimizer and trainer again, and resume; in a job, on all ranks",
            error,
        )


class _Trainer(Protocol):
    @property
    def saver(self) -> Saver: ...


class Together:
    """Save and resume several trainers as one, such as those of a GAN.

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
        if len({name.lower() for name in trainers}) < len(trainers):
            raise ConfigurationError(
                f"some of the names {', '.join(trainers)} differ in case only",
                remedy="give each trainer another name: some file systems do not tell them apart",
            )
        if len(set(map(id, trainers.values()))) < len(trainers):
            raise ConfigurationError("one trainer is given under two names", remedy="give each trainer once")
        self._savers = {name: trainer.saver for name, trainer in trainers.items()}
        # Trainers that disagree on this process's rank would overwrite each other's files.
        jobs = {name: saver.backend.collectives for name, saver in self._savers.items()}
        places = {name: f"rank {job.rank} of {job.world_size}" for name, job in jobs.items()}
        if len(set(places.values())) > 1:
            raise ConfigurationError(
                "trainers of different jobs cannot be saved together",
                why="this process is " + ", ".join(f"{place} to {name}" for name, place in places.items()),
                remedy="make all of them by one `accel`, after it has joined the job",
            )
        self._run = uuid4().hex
        self.extra: dict[str, Any] = {}

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save all trainers as one new checkpoint in `folder`, each with its own `extra`; see `Trainer.save`.

        The checkpoint is named by the largest number of steps.

        Args:
            folder, keep: see `Trainer.save`.
            extra: what else to save beside the trainers' own `extra`. It becomes `extra` of this object.
        """
        with _setting_extra(self, extra):
            return save(self._states(saves=True), as_path(folder), run=self._run, keep=keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Resume all trainers from the newest checkpoint in `folder`, or from `folder` if it is a checkpoint.

        Returns:
            The checkpoint, or None if there is none.

        Raises:
            CheckpointError: the checkpoint is damaged, does not fit a trainer, or holds other trainers. It is raised
                on all ranks, and all trainers are unchanged. If a hook or class of yours raises while the state is
                restored, none of the trainers can train any more.
        """
        found = resume(self._states(), as_path(folder))
        if found is None:
            return None
        for name, saver in self._savers.items():
            saver.resumed(found.manifest["trainers"][name])
        self._run = found.manifest["run"]
        return found.path

    def _states(self, *, saves: bool = False) -> dict[str, TrainingState]:
        states = {name: saver.state(saves=saves) for name, saver in self._savers.items()}
        keeper = min(states)  # the same in whichever order the trainers are given
        parts = [*states[keeper].parts, progress.ExtraPart(self.extra, "together")]
        return {**states, keeper: replace(states[keeper], parts=parts)}


@contextmanager
def _setting_extra(keeper: Saver | Together, extra: Mapping[str, Any] | None) -> Iterator[None]:
    """Set `keeper.extra`, and reset it if saving raises."""
    before = keeper.extra
    if not isinstance(extra, Mapping | None):
        raise ConfigurationError(f"extra={extra!r} is not a dict", remedy='name what you save: extra={"best": 0.5}')
    if extra is not None:
        keeper.extra = dict(extra)
    try:
        yield
    except BaseException:
        keeper.extra = before
        raise
