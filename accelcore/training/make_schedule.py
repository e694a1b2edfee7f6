"""Schedules by name or by function, which are made when the number of updates is known; and warm-up before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from accelcore.errors import ConfigurationError
from accelcore.util.text import did_you_mean, is_whole

__all__ = ["Make", "is_scheduler", "maker"]

Make = Callable[[Optimizer, int], LRScheduler]
"""Makes the scheduler of an optimizer for a number of updates."""

_METHODS = ("step", "state_dict", "load_state_dict")

_NAMED: dict[str, Make] = {
    "constant": lambda optimizer, updates: ConstantLR(optimizer, factor=1.0),
    "cosine": lambda optimizer, updates: CosineAnnealingLR(optimizer, updates),
    "linear": lambda optimizer, updates: LinearLR(optimizer, 1.0, 0.0, updates),
}


def is_scheduler(value: object) -> bool:
    """Return whether a value is used as torch's schedulers are."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _METHODS)


def maker(scheduler: Any, warmup: Any, by: str) -> Make | None:
    """Return the function that makes the scheduler of a trainer's options; None if `scheduler` is made, or None.

    Raises:
        ConfigurationError: the options contradict each other, or one of them is unknown.
    """
    is_share = isinstance(warmup, float) and 0 <= warmup < 1
    if not (is_whole(warmup) or is_share):
        raise ConfigurationError(
            f"warmup={warmup!r} is not a warm-up",
            available="a number of updates, such as 100, or a share of all updates below 1, such as 0.05",
        )
    if scheduler is None or is_scheduler(scheduler):
        if warmup:
            raise ConfigurationError(
                f"warmup={warmup!r} needs a scheduler that the trainer makes",
                available='scheduler="constant", "cosine" or "linear", or a function of the optimizer and the number '
                "of updates",
            )
        return None
    if isinstance(scheduler, str) and scheduler not in _NAMED:
        raise ConfigurationError(
            f"scheduler={scheduler!r} is unknown",
            available=", ".join(_NAMED),
            remedy=did_you_mean(scheduler, _NAMED, "pass a function: scheduler=lambda optimizer, updates: ..."),
        )
    make = _NAMED[scheduler] if isinstance(scheduler, str) else scheduler
    if isinstance(scheduler, type) or not callable(make):
        raise ConfigurationError(
            f"{scheduler!r} is not a scheduler",
            remedy="make one: scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=30); or pass a name, or a "
            "function: scheduler=lambda optimizer, updates: CosineAnnealingLR(optimizer, updates)",
        )
    if by != "window":
        raise ConfigurationError(
            f"schedule_by={by!r} needs a scheduler that is made, and the trainer would make this one for its updates",
            remedy='make it yourself, for the number of epochs; or leave schedule_by="window"',
        )
    return lambda optimizer, updates: _make(make, optimizer, updates, warmup)


def _make(make: Make, optimizer: Optimizer, updates: int, warmup: float) -> LRScheduler:
    """Make a scheduler: a linear rise over the first `warmup` updates, if there are any, and then `make`'s."""
    rising = warmup if isinstance(warmup, int) else round(warmup * updates)
    if rising >= updates:
        raise ConfigurationError(
            f"warmup={warmup!r} is as long as the whole training, of {updates} updates",
            remedy="give a shorter warm-up, or train longer",
        )
    # The schedulers of a sequence are made in order, because each sets the learning rate.
    first = LinearLR(optimizer, 1 / (rising + 1), total_iters=rising) if rising else None
    made = make(optimizer, updates - rising)
    if not is_scheduler(made) or getattr(made, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError(
            f"scheduler= returned {made!r}, which is not a scheduler of the optimizer that it was given",
            remedy="return one: scheduler=lambda optimizer, updates: CosineAnnealingLR(optimizer, updates)",
        )
    return made if first is None else SequentialLR(optimizer, [first, made], milestones=[rising])
