"""Progress bar of a training, or lines if there is no terminal; and the base of observers of a whole training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any
from weakref import finalize

from torch import Tensor

from accelcore.devices.request import requested_trial
from accelcore.errors import ConfigurationError, Settings
from accelcore.training.observers import Observer
from accelcore.training.trainer import Trainer
from accelcore.util.containers import rows
from accelcore.util.text import is_number

_REDRAW = 0.25


class Meter(Settings, Observer):
    """Base of `Progress` and `Log`: counts rows and seconds within epochs. Only the main rank shows and writes."""

    _trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        if self._trainer is not None:
            raise ConfigurationError(
                f"one {type(self).__name__} was given to two trainers", remedy="make one for each trainer"
            )
        self._trainer, self._backend = trainer, trainer.backend
        self._accumulate = trainer.accumulate
        job = trainer.backend.collectives
        # A trial of `accelcore advise` must not replace the log of a training.
        self._is_main, self._ranks = job.rank == 0 and requested_trial() is None, job.world_size
        self._epoch: int | None = None
        self._total = trainer.total_steps
        self._rows, self._seconds = 0, 0.0
        self._since: float | None = None
        self._lr: float | Tensor | None = None

    def epoch_begin(self, epoch: int) -> None:
        assert self._trainer is not None, "begin comes first"
        self._epoch, self._total = epoch, self._trainer.total_steps
        self._since = perf_counter()

    def batch(self, batch: Any) -> None:
        self._rows += rows(batch)

    def epoch_end(self, epoch: int) -> None:
        if self._since is not None:  # what comes between two epochs, such as an evaluation, does not count
            self._seconds += perf_counter() - self._since
            self._since = None

    def learning_rate(self, lr: float | Tensor) -> None:
        self._lr = lr

    def _rows_per_second(self) -> float | None:
        """Return the rows of all ranks a second since the last call; None if they are not known."""
        now = perf_counter()
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        found = self._rows * self._ranks / seconds if self._rows and seconds else None
        self._rows, self._seconds = 0, 0.0
        self._since = None if self._since is None else now
        return found

    def _begin_to_read(self, **tensors: Tensor | None) -> Callable[[], dict[str, float]]:
        """Begin to copy scalars and the learning rate; return a function that waits for them."""
        given = {**tensors, "lr": self._lr}
        fetch = self._backend.runtime.fetch
        waiting = {name: fetch(value) if isinstance(value, Tensor) else value for name, value in given.items()}

        def read() -> dict[str, float]:
            found = {name: value().item() if callable(value) else value for name, value in waiting.items()}
            return {name: value for name, value in found.items() if value is not None}

        return read


class Progress(Meter):
    """Progress bar on stderr: epoch, counted from 0, step, loss, learning rate, rows per second and time left.

    Only the main rank shows it. The loss is the last one of this rank; rows per second count all ranks. The time left
    needs `trainer.total_steps`. A step does not wait for the device: the loss is read one step later.

    What the script prints meanwhile appears above the bar. The bar ends with the last step, or with the process.

    Example:
        >>> trainer = accel.trainer(model, optimizer, observers=[accelcore.Progress()])

    Args:
        seconds: time between two lines, if stderr is not a terminal.

    Raises:
        ConfigurationError: `seconds` is not above 0, or one object was given to two trainers.
    """

    def __init__(self, *, seconds: float = 10.0) -> None:
        if not is_number(seconds) or seconds <= 0:
            raise ConfigurationError(f"seconds={seconds!r} is not a time", remedy="give a number above 0")
        self._line_every = seconds
        self._loss: Tensor | None = None
        self._read: Callable[[], dict[str, float]] | None = None
        self._next = 0.0
        self._bar: _Bar | None = None
        self._first = (0, 0.0)  # the steps and the time when the bar was made

    def loss(self, loss: Tensor) -> None:
        self._loss = loss

    def step(self, steps: int) -> None:
        now, total = perf_counter(), self._total
        if (now < self._next and steps != total) or not self._is_main:
            return
        if self._bar is None:
            self._bar, self._first = _Bar(), (steps, now)
        if self._read is None:
            self._read, self._next = self._begin_to_read(loss=self._loss), 0.0
            if steps != total:
                return
        text = self._text(steps, now, self._read())
        self._read, self._next = None, now + (_REDRAW if self._bar.is_live else self._line_every)
        self._bar.update(steps, total, text)
        if steps == total:
            self._bar.stop()
            self._bar = None

    def _text(self, steps: int, now: float, read: dict[str, float]) -> str:
        total, pace, (done, began) = self._total, self._rows_per_second(), self._first
        left = None
        if total is not None and steps > done:
            left = timedelta(seconds=round((now - began) / (steps - done) * max(0, total - steps)))
        parts = (
            None if self._epoch is None else f"epoch {self._epoch}",
            f"step {steps}" + ("" if total is None else f"/{total}"),
            f"loss {read['loss']:.4g}" if "loss" in read else None,
            f"lr {read['lr']:.3g}" if "lr" in read else None,  # an optimizer may choose it itself, as Adafactor does
            None if pace is None else f"{pace:,.0f} rows/s",
            None if left is None else f"{left} left",
        )
        return "  ".join(part for part in parts if part is not None)


class _Bar:
    """A bar of rich on a terminal, else lines. No thread draws."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self.is_live = self._console.is_interactive
        self._bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # else it would lead what the script writes to a file to the terminal
        )
        self._task: Any = None

    def update(self, steps: int, total: int | None, text: str) -> None:
        if not self.is_live:
            self._console.print(text, highlight=False, soft_wrap=True)
            return
        if self._task is None:
            self._bar.start()
            finalize(self, self._bar.stop)  # at exit, too: it would leave a terminal without its cursor
            self._task = self._bar.add_task(text, total=total)
        self._bar.update(self._task, completed=steps, total=total, description=text, refresh=True)

    def stop(self) -> None:
        if self._task is not None:
            self._bar.stop()
