"""Learning rate schedule: stepped by window, by epoch, or by the script."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelcore.errors import ConfigurationError, TrainingError

__all__ = ["Schedule", "ScheduleBy"]

ScheduleBy = Literal["window", "epoch", "script"]

_METHODS = ("step", "state_dict", "load_state_dict")


class Schedule:
    """Steps a scheduler, if there is one.

    A window that was skipped for overflow counts too: only the device knows, and to ask would make every step wait.
    """

    def __init__(self, scheduler: LRScheduler | None, optimizer: Optimizer, by: ScheduleBy) -> None:
        if by not in get_args(ScheduleBy):
            raise ConfigurationError(
                f"schedule_by={by!r} is unknown",
                available='"window": step after each update; "epoch": after each epoch; "script": you step it',
            )
        if isinstance(scheduler, type) or not (scheduler is None or all(hasattr(scheduler, name) for name in _METHODS)):
            raise ConfigurationError(
                f"{scheduler!r} is not a scheduler",
                remedy="make one: scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)",
            )
        if by != "window" and scheduler is None:
            raise ConfigurationError(f"schedule_by={by!r} was given without a scheduler", remedy="pass scheduler=...")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError(
                "the scheduler belongs to another optimizer", remedy="make it from the optimizer given here"
            )
        if isinstance(scheduler, ReduceLROnPlateau) and by != "script":
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric, which the trainer does not have",
                remedy='set schedule_by="script", and call scheduler.step(metric) yourself',
            )
        self._scheduler, self._by = scheduler, by
        self._steps = scheduler is not None and by != "script"
        self._first = True
        self._epoch = 0
        self._expected: int | None = None  # the scheduler's last_epoch; None: not checked

    def check(self) -> None:
        """Raise TrainingError if the scheduler is not where the trainer left it, or where a set epoch needs it."""
        now = _last_epoch(self._scheduler)
        if None not in (self._expected, now) and now != self._expected:
            raise TrainingError(
                f"the scheduler is at last_epoch={now}, and the trainer expects {self._expected}",
                why=f"the trainer steps it after each {self._by}; the script stepped or loaded it too, or set "
                "trainer.epoch and not the scheduler",
                remedy="leave scheduler.step() out; after trainer.epoch = ... bring the scheduler there by "
                'trainer.scheduler.load_state_dict(...); or set schedule_by="script", and step it yourself',
            )

    def window_ended(self) -> None:
        """Step by window. The script may do anything to the scheduler before the first window ends."""
        if not self._steps:
            return
        self.check()
        if self._by == "window":
            self._step()
        else:
            self._expected = _last_epoch(self._scheduler)

    def epochs_ended(self, epoch: int) -> None:
        """Step by epoch, once for each epoch that ended since the last call; `epoch`: the number of ended epochs."""
        before, self._epoch = self._epoch, epoch  # a step that raises is not repeated
        if self._by == "epoch" and before < epoch:
            self.check()
            for _ in range(before, epoch):
                self._step()

    def restored(self, epoch: int) -> None:
        """Continue after `epoch` ended epochs, with the scheduler as it is now."""
        self._epoch, self._expected = epoch, None

    def move_to(self, epoch: int) -> None:
        """Continue after `epoch` ended epochs; by epoch, the script must bring the scheduler there."""
        moved = epoch != self._epoch
        self.restored(epoch)
        if self._by == "epoch" and moved:
            self._expected = epoch

    def _step(self) -> None:
        assert self._scheduler is not None, "_steps is False without a scheduler"
        try:
            if not self._first:
                self._scheduler.step()
                return
            self._first = False
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
                self._scheduler.step()
        finally:  # a schedule past its end raises, and has counted the step
            self._expected = _last_epoch(self._scheduler)


def _last_epoch(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped; None if it does not count as torch's schedulers do."""
    while not hasattr(scheduler, "last_epoch") and getattr(scheduler, "_schedulers", None):
        scheduler = scheduler._schedulers[0]  # ChainedScheduler has no count
    count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None
