"""The learning rate's schedule: stepped by window, by epoch, or by the script."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelcore.errors import ConfigurationError, TrainingError
from accelcore.training.schedule_place import Place, Places

__all__ = ["Schedule", "ScheduleBy"]

ScheduleBy = Literal["window", "epoch", "script"]

_WORDS = ("step", "state_dict", "load_state_dict")


class Schedule:
    """Steps a scheduler, where there is one.

    A window that was skipped for overflow counts, too: whether it was is known on the device, and to ask would make
    every step wait. torch's schedulers then may say once that they were stepped before their optimizer, which is so.

    Raises:
        ConfigurationError: it is no scheduler, another optimizer's, or one that needs a metric; or `by` is none of the
            three.
    """

    def __init__(self, scheduler: LRScheduler | None, optimizer: Optimizer, by: ScheduleBy) -> None:
        if by not in get_args(ScheduleBy):
            raise ConfigurationError(
                f"schedule_by={by!r} does not say when a scheduler is stepped",
                available='"window": after each update; "epoch": after each epoch; "script": by yourself',
            )
        if isinstance(scheduler, type) or not (scheduler is None or all(hasattr(scheduler, word) for word in _WORDS)):
            raise ConfigurationError(
                f"{scheduler!r} is no scheduler",
                why="one has step, state_dict and load_state_dict, and is no class",
                remedy="make one: scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)",
            )
        if by != "window" and scheduler is None:
            raise ConfigurationError(f"schedule_by={by!r} without a scheduler", remedy="give it as scheduler=")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError(
                "the scheduler is another optimizer's", remedy="make it from the optimizer given here"
            )
        if isinstance(scheduler, ReduceLROnPlateau) and by != "script":
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric, which the trainer does not have",
                remedy='say schedule_by="script", and call scheduler.step(metric) yourself',
            )
        self._scheduler, self._by = scheduler, by
        self._steps = scheduler is not None and by != "script"
        self._first = True
        self._epoch = 0
        self._places = Places(scheduler)
        self._left: Place | None = None
        self._behind: Place | None = None

    def check(self) -> None:
        """See that the scheduler stands where the trainer has left it, or where the script has brought it.

        Raises:
            TrainingError: the script steps it, too; or it has set an epoch, and left the scheduler where it was.
        """
        if self._behind is not None:
            if self._behind.is_still(self._places.now()):
                raise TrainingError(
                    f"trainer.epoch was set to {self._epoch}, and the scheduler is at {self._behind.steps}",
                    why="an epoch does not tell the scheduler's state, which goes with the optimizer's rate",
                    remedy="bring it there: trainer.scheduler.load_state_dict(...), or as many trainer.scheduler."
                    'step(); or say schedule_by="script", and step it yourself',
                )
            self._behind = None
        self.check_steps()

    def check_steps(self) -> None:
        """See that the script has not stepped the scheduler since the trainer did; raises TrainingError."""
        if self._left is not None and self._left.is_stepped_to(self._places.now()):
            raise TrainingError(
                "the script steps the scheduler that the trainer steps",
                why=f"the trainer was given it as scheduler=, and steps it after each {self._by}",
                remedy='leave scheduler.step() out; or say schedule_by="script", and step it yourself',
            )

    def window_ended(self) -> None:
        """A window was closed. What the script did to the scheduler before the first is its own affair."""
        if not self._steps:
            return
        self.check()
        if self._by == "window":
            self._step()
        elif self._left is None:
            self._left = self._places.now()

    def epochs_ended(self, epoch: int) -> None:
        """As many epochs are over as `epoch` says: a step for each that has ended since the last call."""
        before, self._epoch = self._epoch, epoch  # where a step raises, it is not tried again
        if self._by == "epoch" and before < epoch:
            self.check()
            for _ in range(before, epoch):
                self._step()

    def is_at(self, epoch: int) -> None:
        """So many epochs were over before; the scheduler is where it should be."""
        self._epoch, self._left, self._behind = epoch, None, None

    def move_to(self, epoch: int) -> None:
        """The script says that so many epochs were over before; it has brought the scheduler there, or has to."""
        place, left, moved = self._places.now(), self._left, epoch != self._epoch
        untouched = place.steps == 0 if left is None else left.is_still(place)
        self.is_at(epoch)
        if self._by == "epoch" and moved and untouched and place.steps not in (None, epoch):
            self._behind = place

    def _step(self) -> None:
        assert self._scheduler is not None, "without one, nothing is stepped"
        try:
            if not self._first:
                self._scheduler.step()
                return
            self._first = False
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
                self._scheduler.step()
        finally:  # one that is past its end raises, and counts
            self._left = self._places.now()
