"""`Together`: save and resume several trainers of a process as one."""

from __future__ import annotations

import re
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.training.saving.parts import ExtraPart
from accelcore.training.saving.resumable import Resumable
from accelcore.training.saving.trainer_state import TrainerState, Trainings
from accelcore.training.trainer import Trainer
from accelcore.util.text import kind_of

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Together(Resumable):
    """Save and resume several trainers as one, such as the two of a GAN.

    Example:
        >>> both = accelcore.Together(generator=trainer, critic=other)
        >>> both.resume("outputs/gan")  # None: there is no checkpoint yet
        >>> path = both.save("outputs/gan", keep=2)

    A checkpoint holds all of the trainers, each with its own `extra`, and the `extra` of this object.

    Args:
        trainers: trainers of one job, by name. Each trainer has a folder of its name in a checkpoint.

    Attributes:
        extra: the dict last given to `save(extra=...)` of this object, or read by its `resume`.

    Raises:
        ConfigurationError: a value is not a trainer, a trainer has two names, a name cannot be a folder's name, or the
            trainers are of different jobs.
    """

    def __init__(self, *unnamed: Trainer, **trainers: Trainer) -> None:
        super().__init__()
        remedy = "give trainers by name: accelcore.Together(generator=train_g, discriminator=train_d)"
        if unnamed:
            raise ConfigurationError("trainers that are saved together need names", remedy=remedy)
        if not trainers:
            raise ConfigurationError("there are no trainers to save together", remedy=remedy)
        for name, trainer in trainers.items():
            if not isinstance(getattr(trainer, "state", None), TrainerState):
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
        self._trainers = trainers
        # Trainers that disagree on this process's rank would overwrite each other's files.
        jobs = {name: trainer.backend.collectives for name, trainer in trainers.items()}
        places = {name: f"rank {job.rank} of {job.world_size}" for name, job in jobs.items()}
        if len(set(places.values())) > 1:
            where = ", ".join(f"{place} to {name}" for name, place in places.items())
            raise ConfigurationError(
                f"trainers of different jobs cannot be saved together: this process is {where}",
                remedy="make all of them by one `accel`, after it has joined the job",
            )

    def _trainings(self, extra: dict[str, Any] | None) -> Trainings:
        writes = extra is not None
        states = {name: one.state.parts(one.extra, writes=writes) for name, one in self._trainers.items()}
        keeper = min(states)  # the same in whichever order the trainers are given
        parts = [*states[keeper].parts, ExtraPart(self.extra if extra is None else extra, "together")]
        return {**states, keeper: states[keeper]._replace(parts=parts)}
