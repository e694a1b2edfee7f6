"""The learning rate's schedule: stepped by window, by epoch, or by the script."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelcore.errors import ConfigurationError

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
        self._first = True
        self._epoch = 0

    def window_ended(self) -> None:
        """A window was closed."""
        if self._by == "window":
            self._step()

    def epochs_ended(self, epoch: int) -> None:
        """As many epochs are over as `epoch` says: a step for each that has ended since the last call."""
        before, self._epoch = self._epoch, epoch  # where a step raises, it is not tried again
        if self._by == "epoch":
            for _ in range(before, epoch):
                self._step()

    def is_at(self, epoch: int) -> None:
        """So many epochs were over before; the scheduler is where it should be."""
        self._epoch = epoch

    def _step(self) -> None:
        if self._scheduler is None:
            return
        if not self._first:
            self._scheduler.step()
            return
        self._first = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
            self._scheduler.step()
