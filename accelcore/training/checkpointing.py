"""What trainers do with checkpoints, each alone or several together."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from accelcore.backend import Backend
from accelcore.errors import ConfigurationError
from accelcore.training.parts.extra import ExtraPart
from accelcore.training.state import TrainingState, load, resume, save
from accelcore.wording import kind_of

__all__ = ["Checkpointing", "Together"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Checkpointing(ABC):
    """Gives a trainer its words for saving and restoring."""

    steps: int
    extra: dict[str, Any]
    _backend: Backend
    _run: str

    @abstractmethod
    def _state(self, *, saves: bool = False) -> TrainingState:
        """What a checkpoint is made of, where none of it is in motion; `saves`: whether one will be made of it."""

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save all that is needed to go on as if nothing had happened, as a new checkpoint in `folder`.

        Model, optimizer, scaler, schedule, position in the data, random states, gradients of an open window. It
        appears whole or not at all. In a job every rank calls this, with a folder that all of them share.

        Args:
            keep: delete all but the newest `keep` checkpoints of this run afterwards; None deletes nothing.
            extra: what else to save, such as the best score: plain values, tensors, and lists and dicts of these. It
                becomes `trainer.extra`, which later saves keep; in a job rank 0's is saved.
        """
        with _taking(self, extra):
            return save({"": self._state(saves=True)}, _path(folder), run=self._run, keep=keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Go on from the newest checkpoint in `folder`, or from `folder` if it is itself one, whatever their names.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            CheckpointError: it is damaged, belongs to another model, or a hook or class of yours raised when it was
                restored; on all ranks alike, and this trainer is left as it was. Where what raised also stands in the
                way back, the error says so, and this trainer trains no more.
        """
        found = resume({"": self._state()}, _path(folder))
        if found is None:
            return None
        self.steps, self._run = found.steps[""], found.run
        return found.path

    def load(self, path: str | Path) -> dict[str, Any]:
        """Begin with what another program has saved: the model, and the optimizer's state where it is there, too.

        Args:
            path: a file of `torch.save` (`.pth`, `.pt`, Lightning's `.ckpt`) or of safetensors, or a folder of
                accelerate's. It is read without running code (`weights_only`). Every rank reads it.

        Returns:
            What else is in the file, such as its epoch, to do with as you like: `trainer.epoch = rest["epoch"] + 1`,
            `trainer.scheduler.load_state_dict(rest["scheduler"])`.

        Raises:
            CheckpointError: it cannot be read, or does not fit; this trainer is left as it was.
        """
        return load(self._state(), _path(path))


class Together:
    """Saves and resumes several trainers as one.

    Those of a GAN, for example::

        both = accelcore.Together(generator=train_g, discriminator=train_d)
        both.resume("outputs/gan")
        ...
        both.save("outputs/gan", keep=2)

    There is no checkpoint of the one without the other, and none is restored where another cannot be.

    Args:
        trainers: by name, all of one job. Each has its files in a folder of its name.

    Attributes:
        extra: what `save(extra=...)` or `resume` was last given, empty at first; each checkpoint holds it.

    Raises:
        ConfigurationError: there is no trainer, or something else; or one has two names; or a name cannot be that of
            its folder; or not all are of one job.
    """

    def __init__(self, *unnamed: Checkpointing, **trainers: Checkpointing) -> None:
        remedy = "give trainers by name: accelcore.Together(generator=train_g, discriminator=train_d)"
        if unnamed:
            raise ConfigurationError("trainers that are saved together need names", remedy=remedy)
        if not trainers:
            raise ConfigurationError("there are no trainers to save together", remedy=remedy)
        for name, trainer in trainers.items():
            if not isinstance(trainer, Checkpointing):
                raise ConfigurationError(f"{name} is {kind_of(trainer)}, and no trainer", remedy=remedy)
            if not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"{name!r} cannot be a trainer's name",
                    why="it becomes the name of a folder in each checkpoint",
                    remedy="use the letters a to z, and from the second on digits and _",
                )
        if len({name.lower() for name in trainers}) < len(trainers):
            raise ConfigurationError(
                f"of {', '.join(trainers)} some differ in case only",
                why="to some file systems these are one folder",
                remedy="give each trainer a name of its own",
            )
        if len(set(map(id, trainers.values()))) < len(trainers):
            raise ConfigurationError("one trainer is given under two names", remedy="give each trainer once")
        _check_job(trainers)
        self._trainers, self._run = trainers, uuid4().hex
        self.extra: dict[str, Any] = {}

    def save(self, folder: str | Path, *, keep: int | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save all of them as one new checkpoint in `folder`, each with its `extra`; see `Trainer.save`.

        It is named by the steps of the one that has made the most.

        Args:
            extra: as that of `Trainer.save`, and beside the trainers' own. It becomes `extra` of this object.
        """
        with _taking(self, extra):
            return save(self._states(saves=True), _path(folder), run=self._run, keep=keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Go on, all of them, from the newest checkpoint in `folder`, or from `folder` if it is itself one.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            CheckpointError: it is damaged, does not fit one of them, or is of others; on all ranks alike, and all
                trainers are left as they were.
        """
        found = resume(self._states(), _path(folder))
        if found is None:
            return None
        for name, trainer in self._trainers.items():
            trainer.steps = found.steps[name]
        self._run = found.run
        return found.path

    def _states(self, *, saves: bool = False) -> dict[str, TrainingState]:
        states = {name: trainer._state(saves=saves) for name, trainer in self._trainers.items()}
        keeper = min(states)  # of what belongs to all; in whichever order they are given
        parts = [*states[keeper].parts, ExtraPart(self.extra, "together")]
        return {**states, keeper: replace(states[keeper], parts=parts)}


@contextmanager
def _taking(keeper: Checkpointing | Together, extra: Mapping[str, Any] | None) -> Iterator[None]:
    """Have `extra` as that of a trainer, or of several, where one is given, and the save that it is for succeeds."""
    before = keeper.extra
    if extra is not None:
        keeper.extra = _as_dict(extra)
    try:
        yield
    except BaseException:
        keeper.extra = before
        raise


def _path(given: Any) -> Path:
    try:
        return Path(given)
    except TypeError as error:
        raise ConfigurationError(f"{given!r} is no path", remedy="give a string or a pathlib.Path") from error


def _as_dict(extra: Any) -> dict[str, Any]:
    if isinstance(extra, Mapping):
        return dict(extra)
    raise ConfigurationError(f"extra={extra!r} is no dict", remedy='give what is saved a name: extra={"best": 0.5}')


def _check_job(trainers: Mapping[str, Checkpointing]) -> None:
    """Trainers whose backends take this process for another rank, or for none, would write over each other's files."""
    jobs = {name: trainer._backend.collectives for name, trainer in trainers.items()}
    places = {name: f"rank {job.rank} of {job.world_size}" for name, job in jobs.items()}
    if len(set(places.values())) > 1:
        raise ConfigurationError(
            "trainers of different jobs cannot be saved together",
            why="this process is " + ", ".join(f"{place} to {name}" for name, place in places.items()),
            remedy="make all of them by one `accel`, which has joined the job",
        )
