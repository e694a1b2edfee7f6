"""Learning rate schedule: made when the number of updates is known; stepped by window or by the script."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LRScheduler, StepLR

from accelcore.errors import AccelError, CheckpointError, ConfigurationError, Once, TrainingError, did_you_mean
from accelcore.torch_internals import expect_no_step
from accelcore.util.text import bound, is_whole, text_remedy

ScheduleBy = Literal["window", "script"]

_NONE, _TO_BE_MADE = "no scheduler", "a scheduler that is not made yet"

_METHODS = ("step", "state_dict", "load_state_dict")

# Of the share of the updates after the warm-up that are done, at most 1.
_NAMED: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


class Schedule:
    """Makes a scheduler, if it is given by name or function, and steps it, if there is one.

    A window that was skipped for overflow counts too: only the device knows, and to ask would make every step wait.

    A schedule by name ends after its updates, and its learning rate stays. A scheduler of a function is torch's, which
    may rise again or raise.
    """

    scheduler: LRScheduler | None = None  # None without a scheduler, or before it is made
    updates: int | None = None  # the number of updates that it was made for; None if it was given, or is not made yet

    def __init__(self, scheduler: Any, optimizer: Optimizer, by: ScheduleBy | None, warmup: float, log: Once) -> None:
        if by not in (None, *get_args(ScheduleBy)):
            raise ConfigurationError(
                f"schedule_by={by!r} is unknown",
                available='"window": step after each update; "script": you step it, such as after each epoch',
            )
        self.by, self._warmup, self._optimizer, self._log = by or "window", warmup, optimizer, log
        is_named = isinstance(scheduler, str)
        is_function = callable(scheduler) and not isinstance(scheduler, type) and bound(scheduler, None, 1) is not None
        self._name = scheduler if is_named else ""
        make = partial(_of_name, self._name, warmup) if is_named else scheduler
        self._make: Callable[[Optimizer, int], LRScheduler] | None = make if is_named or is_function else None
        # A schedule by name fits, and with `schedule_by` the script says what is counted.
        self._may_not_fit = not (scheduler is None or is_named or by)
        self._updates_are_checked = self._make is None  # by `check_updates`
        self._checkpoint = "FOLDER"  # the path of the one that was restored, for errors
        self._expected: int | None = None  # the scheduler's last_epoch; None: not checked
        if self.by == "script" and (scheduler is None or self._make is not None):
            raise ConfigurationError(
                f"schedule_by={by!r} needs a scheduler, not {'None' if scheduler is None else 'a name or a function'}",
                remedy='make the scheduler yourself, or leave schedule_by="window"',
            )
        if not (is_whole(warmup) or (isinstance(warmup, float) and 0 <= warmup < 1)) or (warmup and not is_named):
            raise ConfigurationError(
                f"warmup={warmup!r} is not possible with scheduler={scheduler!r}",
                available="a number of updates, such as 100, or a share of all updates below 1, such as 0.05, with a "
                f"schedule by name: {', '.join(_NAMED)}",
                remedy=text_remedy(warmup)
                or "give one of these; any other schedule has a warm-up of its own, as by torch's SequentialLR",
            )
        if is_named and scheduler not in _NAMED:
            remedy = did_you_mean(scheduler, _NAMED, "pass a function: scheduler=lambda optimizer, updates: ...")
            raise ConfigurationError(f"scheduler={scheduler!r} is unknown", available=", ".join(_NAMED), remedy=remedy)
        if scheduler is not None:
            if self._make is None:
                self.scheduler = self._checked(scheduler)
            expect_no_step(optimizer)  # a trainer may update without calling `step`

    @property
    def is_to_be_made(self) -> bool:
        """Whether the scheduler still waits for the number of updates."""
        return self.scheduler is None and self._make is not None

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
        self.scheduler, self.updates = self._checked(self._make(self._optimizer, updates)), updates

    def _checked(self, scheduler: Any) -> LRScheduler:
        """Return a scheduler; raise ConfigurationError if it is none, or cannot be stepped."""
        if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in _METHODS):
            raise ConfigurationError(
                f"{scheduler!r} is not a scheduler",
                remedy="make one: scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=30); or pass a name, "
                "or a function of optimizer and number of updates that returns one: "
                "scheduler=lambda optimizer, updates: CosineAnnealingLR(optimizer, updates)",
            )
        if getattr(scheduler, "optimizer", self._optimizer) is not self._optimizer:
            raise ConfigurationError("the scheduler belongs to another optimizer", remedy="make it from this optimizer")
        if self.by == "window" and bound(scheduler.step) is None:  # such as ReduceLROnPlateau
            raise ConfigurationError(
                f"{type(scheduler).__name__}.step needs an argument, such as a metric, which the trainer does not have",
                remedy='make the scheduler yourself, set schedule_by="script", and call scheduler.step(...)',
            )
        return scheduler  # type: ignore[no-any-return]  # of any class with these methods

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

    def warn_of_length(self, epochs: int | None, updates: int | None, reached: int | None) -> None:
        """Log once that the scheduler is, or seems to be, made for another number of steps than that of the updates.

        Args:
            epochs: the number of epochs; None if it is unknown, like the others.
            updates: the number of updates, as given for the whole training, or `reached`.
            reached: the number of updates that the loops of the script make.
        """
        # Without `total_steps=`, `updates` is `reached`, and may change with the loader.
        if self.updates and updates and reached and reached < updates:
            self._log.warn(
                "total_steps=%d, and trainer.epochs(...) makes %d updates if each epoch has as many batches as this "
                "one, and no other loop over epochs follows: the schedule then does not come to its end. An update "
                "takes accumulate= batches, and a rank its share. If so, remove total_steps=: then the trainer counts",
                updates,
                reached,
            )
        if not (self._may_not_fit and epochs and updates):
            return
        rises_again = isinstance(self.scheduler, CosineAnnealingLR) and self.scheduler.T_max < 0.9 * updates
        if rises_again or _seems_to_count_otherwise(self.scheduler, epochs, updates):
            self._log.warn(
                "%s seems to be made for another number of steps: the trainer steps it after each of %d updates. Make "
                "it for %d updates, or give scheduler=lambda optimizer, updates: ..., which gets this number. If it "
                'counts epochs, give accel.trainer(..., schedule_by="script"), and call scheduler.step() after each '
                'epoch. If it is right, give schedule_by="window", which ends this warning',
                *(type(self.scheduler).__name__, updates, updates),
            )

    def state(self) -> dict[str, Any]:
        state = None if self.scheduler is None else self.scheduler.state_dict()
        return {"kind": self._kind, "updates": self.updates, "state": state}

    @property
    def _kind(self) -> str:
        if self.scheduler is None:
            return _TO_BE_MADE if self.is_to_be_made else _NONE
        named = f'scheduler="{self._name}" with warmup={self._warmup or 0}'
        return f"{named if self._name else f'a {type(self.scheduler).__name__}'}, stepped by the {self.by}"

    def prepare(self, kind: str, updates: int | None, state: dict[str, Any], path: str) -> Callable[[], object]:
        """Return the function that restores a scheduler; raise CheckpointError if it is another one than this.

        Makes the scheduler, if that was not possible before: it may add options to the optimizer's groups, which are
        compared next. `path` is that of the checkpoint.
        """
        if self.is_to_be_made and updates is not None:
            self.make(updates)
        if kind != self._kind:
            raise CheckpointError(
                f"the checkpoint has {kind}, and this trainer has {self._kind}",
                remedy="give the trainer the scheduler=, warmup= and schedule_by= of the run that saved it, or remove "
                f"them if it had none; or {_new_run(path)}",
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
        assert not self.is_to_be_made, "a window needs a scheduler that is made"
        if self.scheduler is None or self.by == "script":
            return
        self.check()
        done = _last_epoch(self.scheduler)
        if self.updates is not None and done is not None and done >= self.updates and self._name != "constant":
            self._log.warn(
                "the schedule ended at update %d, and a later update was trained: the learning rate of a schedule by "
                "name is then 0. To train further, load the model into a new trainer, which makes a new schedule",
                self.updates,
            )
        try:
            self.scheduler.step()
        except ValueError as error:  # such as OneCycleLR
            raise TrainingError(
                f"{type(self.scheduler).__name__} cannot go on after update {done}",
                why=str(error),
                remedy="make it for all updates: scheduler=lambda optimizer, updates: ..., which gets their number",
            ) from error
        finally:  # a schedule past its end raises, and has counted the step
            self._expected = _last_epoch(self.scheduler)

    def restored(self) -> None:
        """Continue with the scheduler as it is now."""
        self._expected = None


class _Named(LambdaLR):
    """Multiplies the present rates: also that of a group that was added, and one that the script has set."""

    def get_lr(self) -> list[float | Tensor]:
        now, before = map(self.lr_lambdas[0], (self.last_epoch, self.last_epoch - 1))
        return [group["lr"] * now / (before or 1.0) for group in self.optimizer.param_groups]


def _of_name(name: str, warmup: float, optimizer: Optimizer, updates: int) -> LRScheduler:
    """Make the schedule of a name: a linear rise over the updates of the warm-up, and then its curve."""
    curve, rising = _NAMED[name], warmup if isinstance(warmup, int) else round(warmup * updates)
    if rising >= updates:
        raise ConfigurationError(
            f"warmup={warmup!r} is as long as the whole training, of {updates} updates",
            remedy="give a shorter warm-up, or train longer",
        )

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / (rising + 1)) * curve(min(1.0, max(0, step - rising) / (updates - rising)))

    return _Named(optimizer, factor)


def _new_run(path: str) -> str:
    return f'begin a run with a new schedule, in another folder, by trainer.load("{path}", optimizer=True)'


def _another_length(kind: type[AccelError], saved: int | None, own: int | None, path: str) -> AccelError:
    return kind(
        f"the checkpoint's schedule was made for {saved} updates, and this training has {own}",
        why="the run that saved it had other epochs, batches, ranks or accumulate",
        remedy=f"{_new_run(path)}. Or train as that run did. Or keep its schedule by total_steps={saved}: "
        '"cosine" and "linear" then train any later update at the learning rate 0',
    )


def _seems_to_count_otherwise(scheduler: Any, epochs: int, updates: int) -> bool:
    """Return whether a scheduler seems to be made for epochs or batches, or its rate is almost 0 after `updates`."""
    if isinstance(scheduler, StepLR | ExponentialLR):
        return bool(scheduler.gamma ** (updates // getattr(scheduler, "step_size", 1)) < 1e-6)
    if parts := getattr(scheduler, "_schedulers", ()):
        return any(_seems_to_count_otherwise(part, epochs, updates) for part in parts)
    own = (getattr(scheduler, name, None) for name in ("T_max", "total_steps"))
    length = max([*filter(is_whole, own), *getattr(scheduler, "milestones", ())], default=0)
    return bool(length > updates or 0 < length <= epochs <= updates // 2)


def _last_epoch(scheduler: Any) -> int | None:
    """Return how often a scheduler was stepped; None if it does not count as torch's schedulers do."""
    while not hasattr(scheduler, "last_epoch") and getattr(scheduler, "_schedulers", None):
        scheduler = scheduler._schedulers[0]  # ChainedScheduler has no count
    count = getattr(scheduler, "last_epoch", None)
    return count if isinstance(count, int) else None
