"""The learning rate's schedule: stepped once a window."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelcore.errors import ConfigurationError

__all__ = ["Schedule"]


class Schedule:
    """Steps a scheduler, where there is one.

    A window that was skipped for overflow counts, too: whether it was is known on the device, and to ask would make
    every step wait. torch's schedulers then may say once that they were stepped before their optimizer, which is so.

    Raises:
        ConfigurationError: it is another optimizer's, or one that needs a metric.
    """

    def __init__(self, scheduler: LRScheduler | None, optimizer: Optimizer) -> None:
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError(
                "the scheduler is another optimizer's", remedy="make it from the optimizer given here"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigurationError(
                "ReduceLROnPlateau needs a metric, which the trainer does not have",
                remedy="leave it out here and call scheduler.step(metric) yourself",
            )
        self._scheduler = scheduler
        self._first = True

    def step(self) -> None:
        if self._scheduler is None:
            return
        if not self._first:
            self._scheduler.step()
            return
        self._first = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before", UserWarning)
            self._scheduler.step()
