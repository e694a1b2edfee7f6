"""Saving and resuming several trainers as one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.training.saving.parts import ExtraPart
from accelcore.training.saving.saver import Saver, TrainingState, new_extra, restore_checkpoint, write_checkpoint
from accelcore.util.text import kind_of

__all__ = ["Together"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


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
        new = new_extra(extra, self.extra)
        states = {name: saver.state(saver.extra) for name, saver in self._savers.items()}
        path = write_checkpoint(_with_extra(states, new), folder, run=self._run, keep=keep, best=best)
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
        found = restore_checkpoint(_with_extra(states, self.extra), folder, best=best, must_exist=must_exist)
        if found is None:
            return None
        self._run = found.manifest["run"]
        return found.path


def _with_extra(states: Mapping[str, TrainingState], extra: dict[str, Any]) -> dict[str, TrainingState]:
    """Return the states with what `Together` saves itself, which one of them keeps."""
    keeper = min(states)  # the same in whichever order the trainers are given
    parts = [*states[keeper].parts, ExtraPart(extra, "together")]
    return {**states, keeper: states[keeper]._replace(parts=parts)}
