"""Learning rate schedule: made when the number of updates is known; stepped by window or by the script."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from accelcore.errors import AccelError, CheckpointError, ConfigurationError, Once, TrainingError, did_you_mean, logger
from accelcore.torch_internals import expect_no_step
from accelcore.util.text import bound, is_whole

ScheduleBy = Literal["window", "script"]

Make = Callable[[Optimizer, int], LRScheduler]  # makes the scheduler of an optimizer for a number of updates

_NONE = "NoneType"
_TO_BE_MADE = "scheduler that is not made yet"

_METHODS = ("step", "state_dict", "load_state_dict")

_NAMED: dict[str, Make] = {
    "constant": lambda optimizer, updates: ConstantLR(optimizer, factor=1.0),
    "cosine": lambda optimizer, updates: CosineAnnealingLR(optimizer, updates),
    "linear": lambda optimizer, updates: LinearLR(optimizer, 1.0, 0.0, updates),
}


class Schedule:
    """Makes a scheduler, if it is given by name or function, and steps it, if there is one.

    A window that was skipped for overflow counts too: only the device knows, and to ask would make every step wait.

    A schedule by name ends after its updates, and its learning rate stays. torch's cosine would rise again. A scheduler
    of a function is torch's, and may do that or raise.
    """

    scheduler: LRScheduler | None  # None without a scheduler, or before it is made
    updates: int | None = None  # the number of updates that it was made for; None if it was given, or is not made yet

    def __init__(self, scheduler: Any, optimizer: Optimizer, by: ScheduleBy | None, warmup: float, log: Once) -> None:
        self._named = scheduler if isinstance(scheduler, str) else ""
        # A schedule by name fits, and with `schedule_by` the script says what is counted.
        self._may_not_fit = not self._named and by is None  # until `warn_of_length` has looked
        by = by or "window"
        if by not in get_args(ScheduleBy):
            raise ConfigurationError(
                f"schedule_by={by!r} is unknown",
                available='"window": step after each update; "script": you step it, such as after each epoch',
            )
        self._make = _maker(scheduler, warmup, by)
        if by != "window" and scheduler is None:
            raise ConfigurationError(f"schedule_by={by!r} was given without a scheduler", remedy="pass scheduler=...")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise ConfigurationError(
                "the scheduler belongs to another optimizer", remedy="make it from the optimizer given here"
            )
        if self._make is None and by != "script":
            _check_step(scheduler)
        self.scheduler, self.by, self._optimizer = None if self._make else scheduler, by, optimizer
        self._steps_by_window = scheduler is not None and by == "window"
        self._updates_are_checked = self._make is None  # by `check_updates`
        self._log = log
        self._checkpoint = "FOLDER"  # the path of the one that was restored, for errors
        self._expected: int | None = None  # the scheduler's last_epoch; None: not checked
        if scheduler is not None:
            expect_no_step(optimizer)  # a trainer may update without calling `step`

    @property
    def is_to_be_made(self) -> bool:
        """Whether the scheduler still waits for the number of updates."""
        return self._make is not None and self.scheduler is None

    def begin(self, updates: int | None) -> None:
        """Note the learning rates that the schedule will begin from; make it if the number of updates is given."""
        if self.is_to_be_made:
            for group in self._optimizer.param_groups:  # as schedulers do; a checkpoint has them
                lr = group.get("lr")
                if lr is None:
                    raise ConfigurationError(
                        "the optimizer has no learning rate that a schedule could change",
                        remedy="give it lr=..., or remove scheduler=",
                    )
                group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr)
            if updates is not None:
                self.check_updates(updates)

    def make(self, updates: int) -> None:
        assert self._make is not None, "the scheduler was given"
        self.scheduler, self.updates = self._make(self._optimizer, updates), updates

    def check_updates(self, updates: int | None) -> None:
        """Make the scheduler, or compare it with the number of updates, once; None: the number is unknown."""
        if self._updates_are_checked or updates == 0:  # an empty loader raises next
            return
        if updates is None and self.scheduler is None:
            raise ConfigurationError(
                "the schedule cannot be made, because the number of updates is not known",
                why="it needs loops over trainer.epochs(n) and trainer.batches(loader), and a loader with a length",
                remedy="write the loops so, or give accel.trainer(..., total_steps=...)",
            )
        if updates is not None and self.scheduler is None:
            self.make(updates)
        elif updates not in (None, self.updates):
            raise _another_length(ConfigurationError, self.updates, updates, self._checkpoint)
        self._updates_are_checked = True

    def warn_of_length(self, epochs: int | None, updates: int | None) -> None:
        """Log once that the scheduler seems to be made for another number of steps than that of the updates."""
        if not (self._may_not_fit and self._steps_by_window and epochs and updates):
            return
        self._may_not_fit = False
        if (
            _length(self.scheduler) > updates
            or 0 < _end(self.scheduler) < updates * (1 if isinstance(self.scheduler, OneCycleLR) else 0.9)
            or (updates >= 2 * epochs and _counts_epochs(self.scheduler, epochs, updates))
        ):
            logger.warning(
                "%s seems to be made for another number of steps: the trainer steps it after each of %d updates. Make "
                "it for %d updates, or give scheduler=lambda optimizer, updates: ..., which gets this number. If it "
                'counts epochs, give accel.trainer(..., schedule_by="script"), and call scheduler.step() after each '
                'epoch. If it is right, give schedule_by="window", which ends this warning',
                *(type(self.scheduler).__name__, updates, updates),
            )

    def state(self) -> dict[str, Any]:
        state = None if self.scheduler is None else self.scheduler.state_dict()
        return {"kind": self._kind, "by": self.by, "updates": self.updates, "state": state}

    @property
    def _kind(self) -> str:
        return _TO_BE_MADE if self.is_to_be_made else type(self.scheduler).__name__

    def prepare(self, kind: str, updates: int | None, state: dict[str, Any], path: str) -> Callable[[], object]:
        """Return the function that restores a scheduler; raise CheckpointError if it is another one than this.

        Makes the scheduler, if that was not possible before: it may add options to the optimizer's groups, which are
        compared next. `path` is that of the checkpoint.
        """
        if self.is_to_be_made and updates is not None:
            self.make(updates)
        if kind != self._kind:
            saved, has = ("no scheduler" if name == _NONE else f"a {name}" for name in (kind, self._kind))
            as_saved = "give the trainer the scheduler= and warmup= of the run that saved it"
            if kind == _NONE:
                as_saved = "remove scheduler=, warmup= and schedule_by="
            raise CheckpointError(
                f"the checkpoint has {saved}, and this trainer has {has}",
                remedy=f"{as_saved}; or {_new_run(path)}",
            )
        if None not in (updates, self.updates) and updates != self.updates:
            raise _another_length(CheckpointError, updates, self.updates, path)
        scheduler, self._checkpoint = self.scheduler, path
        return lambda: None if scheduler is None else scheduler.load_state_dict(state)

    def warn_if_unknown(self) -> None:
        """Log once that checkpoints lack a scheduler that the script has made and not given.

        torch's schedulers, except ReduceLROnPlateau, write `initial_lr` into the optimizer's groups.
        """
        if self._kind == _NONE and any("initial_lr" in group for group in self._optimizer.param_groups):
            self._log.warn(
                "the optimizer has a scheduler that the trainer does not know: the checkpoint lacks its state, and a "
                "resumed run starts it again. Give it to the trainer: accel.trainer(..., scheduler=scheduler, "
                'schedule_by="script"), if you step it yourself. Or save it by trainer.save(folder, '
                'extra={"scheduler": scheduler.state_dict()}), and load trainer.extra["scheduler"] after the resume'
            )

    def check(self) -> None:
        """Raise TrainingError if the scheduler is not where the trainer left it."""
        now = _last_epoch(self.scheduler)
        if None not in (self._expected, now) and now != self._expected:
            raise TrainingError(
                f"the scheduler is at last_epoch={now}, and the trainer expects {self._expected}",
                why="the script stepped or loaded it, and the trainer steps it after each window",
                remedy='remove scheduler.step(), or set schedule_by="script"',
            )

    def window_ended(self) -> None:
        """Step by window; log once that the schedule had ended before this window.

        The script may do anything to the scheduler before the first window ends.
        """
        if not self._steps_by_window:
            return
        assert self.scheduler is not None, "a window needs a scheduler that is made"
        self.check()
        done = _last_epoch(self.scheduler)
        has_ended = self.updates is not None and done is not None and done >= self.updates
        if has_ended and self._named != "constant":  # a constant rate has no end
            self._log.warn(
                "the schedule ended at update %d, and a later update was trained at the learning rate %s. To train "
                "further, load the model into a new trainer, which makes a new schedule",
                self.updates,
                " and ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in self._optimizer.param_groups)),
            )
        try:
            if not (has_ended and self._named):
                self.scheduler.step()
        finally:  # a schedule past its end raises, and has counted the step
            self._expected = _last_epoch(self.scheduler)

    def restored(self) -> None:
        """Continue with the scheduler as it is now."""
        self._expected = None


def _is_scheduler(value: object) -> bool:
    """Return whether a value is used as torch's schedulers are."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _METHODS)


def _check_step(scheduler: Any) -> None:
    """Raise ConfigurationError if a scheduler's `step` needs an argument, as that of ReduceLROnPlateau does."""
    try:
        arguments = signature(scheduler.step).parameters.values() if scheduler is not None else ()
    except (TypeError, ValueError):  # compiled code may have no signature
        return
    for each in arguments:
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise ConfigurationError(
                f"{type(scheduler).__name__}.step needs {each.name!r}, which the trainer does not have",
                remedy='make the scheduler yourself, set schedule_by="script", and call '
                f"scheduler.step({each.name}) where you know it",
            )


def _maker(scheduler: Any, warmup: Any, by: str) -> Make | None:
    """Return the function that makes the scheduler of a trainer's options; None if `scheduler` is made, or None."""
    is_share = isinstance(warmup, float) and 0 <= warmup < 1
    if not (is_whole(warmup) or is_share):
        raise ConfigurationError(
            f"warmup={warmup!r} is not a warm-up",
            available="a number of updates, such as 100, or a share of all updates below 1, such as 0.05",
        )
    if scheduler is None or _is_scheduler(scheduler):
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
    if bound(make, None, 1) is None:
        raise ConfigurationError(
            "the function given as scheduler= does not take an optimizer and the number of updates",
            remedy="write scheduler=lambda optimizer, updates: ..., which returns a scheduler",
        )
    if by != "window":
        raise ConfigurationError(
            f"schedule_by={by!r} needs a scheduler, not a name or a function",
            why="from a name or a function, the trainer makes a scheduler, and steps it after each update",
            remedy='make the scheduler yourself, or leave schedule_by="window"',
        )
    return lambda optimizer, updates: _with_warmup(make, optimizer, updates, warmup)


def _with_warmup(make: Make, optimizer: Optimizer, updates: int, warmup: float) -> LRScheduler:
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
    if not _is_scheduler(made) or getattr(made, "optimizer", optimizer) is not optimizer:
        raise ConfigurationError(
            f"scheduler= returned {made!r}, which is not a scheduler of the optimizer that it was given",
            remedy="return one: scheduler=lambda optimizer, updates: CosineAnnealingLR(optimizer, updates)",
        )
    _check_step(made)
    return made if first is None else _sequence(optimizer, first, made, rising)


def _sequence(optimizer: Optimizer, first: LRScheduler, then: LRScheduler, milestone: int) -> SequentialLR:
    """Return SequentialLR. In torch 2.7 it makes `initial_lr` a group's `lr`: a tensor that each step overwrites.

    Therefore it gets copies of tensors. Each group keeps its own, which a captured step reads.
    """
    kept = [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups]
    for group, (_, initial) in zip(optimizer.param_groups, kept, strict=True):
        group["initial_lr"] = initial.clone() if isinstance(initial, Tensor) else initial
    sequence = SequentialLR(optimizer, [first, then], milestones=[milestone])
    for group, (lr, initial) in zip(optimizer.param_groups, kept, strict=True):
        group["initial_lr"] = initial
        if isinstance(lr, Tensor):
            group["lr"] = lr.fill_(group["lr"])
    return sequence


def _new_run(path: str) -> str:
    return f'begin a run with a new schedule, in another folder, by trainer.load("{path}", optimizer=True)'


def _another_length(kind: type[AccelError], saved: int | None, own: int | None, path: str) -> AccelError:
    return kind(
        f"the checkpoint's schedule was made for {saved} updates, and this training has {own}",
        why="the run that saved it had other epochs, batches, ranks or accumulate",
        remedy=f"{_new_run(path)}. Or train as that run did. Or keep its schedule by total_steps={saved}: "
        '"cosine" and "linear" then train any later update at the learning rate 0',
    )


def _counts_epochs(scheduler: Any, epochs: int, updates: int) -> bool:
    """Return whether a scheduler is over within `epochs` steps, or its learning rate is almost 0 after `updates`."""
    if isinstance(scheduler, StepLR | ExponentialLR):
        return bool(scheduler.gamma ** (updates // getattr(scheduler, "step_size", 1)) < 1e-6)
    if last := getattr(scheduler, "T_max", None) or max(getattr(scheduler, "milestones", ()), default=0):
        return bool(last <= epochs)
    return any(_counts_epochs(each, epochs, updates) for each in getattr(scheduler, "_schedulers", ()))


def _end(scheduler: Any) -> int:
    """Return the step after which a scheduler raises, rises again or has fallen for good; 0 if that is not known."""
    if isinstance(scheduler, SequentialLR):
        last = _end(scheduler._schedulers[-1])
        return last and scheduler._milestones[-1] + last
    falls = isinstance(scheduler, LinearLR) and scheduler.end_factor < scheduler.start_factor
    return _length(scheduler) if falls or isinstance(scheduler, CosineAnnealingLR | OneCycleLR | PolynomialLR) else 0


def _length(scheduler: Any) -> int:
    """Return the number of steps that a scheduler was made for, the longest of its parts; 0 if that is not known."""
    own = (getattr(scheduler, name, None) for name in ("T_max", "total_steps", "total_iters"))
    return max([0, *filter(is_whole, own), *map(_length, getattr(scheduler, "_schedulers", ()))])


def _last_epoch(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped; None if it does not count as torch's schedulers do."""
    while not hasattr(scheduler, "last_epoch") and getattr(scheduler, "_schedulers", None):
        scheduler = scheduler._schedulers[0]  # ChainedScheduler has no count
    count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None
