"""Progress bar of a training, or lines if there is no terminal; and the base of observers of a whole training."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from accelcore.devices.request import requested_trial
from accelcore.errors import ConfigurationError, Settings
from accelcore.training.observers import Observer
from accelcore.training.trainer import Trainer
from accelcore.util.containers import rows
from accelcore.util.text import is_number

_REDRAW = 0.25
_FORMATS = {
    "epoch": "epoch {}",
    "at": "step {}",
    "loss": "loss {:.4g}",
    "lr": "lr {:.3g}",  # an optimizer may choose it itself, as Adafactor does
    "rows_per_second": "{:,.0f} rows/s",
    "left": "{} left",
}


class Meter(Settings, Observer):
    """Base of `Progress` and `Log`: collects figures, and shows them on the main rank after some of the steps.

    A step does not wait for the device: the figures of a step are read one step later, except those of the last one.
    """

    measures_norm = False
    _averaged: int | None = None  # how many of the losses since the last figures count; None: all
    _trainer: Trainer  # missing before `begin`
    _epoch: int | None = None
    _since: float | None = None  # the time when the epoch began, or the last figures in it
    _lr: float | Tensor | None = None
    _norm: Tensor | None = None
    _read: Callable[[], dict[str, Any]] | None = None

    def begin(self, trainer: Trainer) -> None:
        if hasattr(self, "_trainer"):
            raise ConfigurationError(f"one {type(self).__name__} was given to two trainers", remedy="make one for each")
        self._trainer, self._backend = trainer, trainer.backend
        job = trainer.backend.collectives
        # A trial of `accelcore advise` must not replace the log of a training.
        self._is_main, self._ranks = job.rank == 0 and requested_trial() is None, job.world_size
        self._total = trainer.total_steps
        self._rows, self._seconds, self._start = 0, 0.0, perf_counter()
        self._losses = deque[Tensor](maxlen=self._averaged)

    def epoch_begin(self, epoch: int) -> None:
        self._epoch, self._total = epoch, self._trainer.total_steps
        self._since = perf_counter()

    def batch(self, batch: Any) -> None:
        self._rows += rows(batch)

    def epoch_end(self, epoch: int) -> None:
        if self._since is not None:  # what comes between two epochs, such as an evaluation, does not count
            self._seconds += perf_counter() - self._since
            self._since = None

    def loss(self, loss: Tensor) -> None:
        if self._is_main:
            self._losses.append(loss)

    def gradient_norm(self, norm: Tensor) -> None:
        self._norm = norm

    def learning_rate(self, lr: float | Tensor) -> None:
        self._lr = lr

    def step(self, steps: int) -> None:
        if self._is_main:
            self._finish()
            if steps == self._total or self._is_due(steps):
                self._collect(steps)
            if steps == self._total:
                self._finish()

    @abstractmethod
    def _is_due(self, steps: int) -> bool:
        """Return whether the figures of this step are to be shown."""

    @abstractmethod
    def _show(self, figures: dict[str, Any]) -> None:
        """Show the figures of a step; those that are not known are None."""

    def _collect(self, steps: int) -> None:
        """Collect the figures since the last ones, if there are any, and begin to copy those on the device."""
        if not self._losses:
            return
        now, fetch = perf_counter(), self._backend.runtime.fetch
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        pace = self._rows * self._ranks / seconds if self._rows and seconds else None
        self._rows, self._seconds, self._since = 0, 0.0, self._since and now
        loss = torch.stack([*self._losses]).mean(dtype=torch.float32)
        self._losses.clear()
        given = {"loss": loss, "lr": self._lr, "gradient_norm": self._norm}
        copies = {name: fetch(value) for name, value in given.items() if isinstance(value, Tensor)}
        figures = {"step": steps, "epoch": self._epoch, **given, "rows_per_second": pace, "seconds": now - self._start}
        self._read = lambda: figures | {name: copy().item() for name, copy in copies.items()}

    def _finish(self) -> None:
        """Show the figures that were collected, if there are any; wait for them."""
        if self._read is not None:
            figures, self._read = self._read(), None
            self._show(figures)


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

    _averaged = 1

    def __init__(self, *, seconds: float = 10.0) -> None:
        if not is_number(seconds) or seconds <= 0:
            raise ConfigurationError(f"seconds={seconds!r} is not a time", remedy="give a number above 0")
        self._line_every = seconds
        self._next = 0.0
        self._bar: _Bar | None = None

    def _is_due(self, steps: int) -> bool:
        return perf_counter() >= self._next

    def _show(self, figures: dict[str, Any]) -> None:
        if self._bar is None:
            self._bar, self._first = _Bar(), figures
        self._next = perf_counter() + (_REDRAW if self._bar.is_live else self._line_every)
        self._bar.update(figures["step"], self._total, self._text(figures))
        if figures["step"] == self._total:
            self._bar = None

    def _text(self, figures: dict[str, Any]) -> str:
        step, total = figures["step"], self._total
        done, seconds = step - self._first["step"], figures["seconds"] - self._first["seconds"]
        left = None if total is None or not done else timedelta(seconds=round(seconds / done * max(0, total - step)))
        shown = {**figures, "at": step if total is None else f"{step}/{total}", "left": left}
        return "  ".join(text.format(shown[name]) for name, text in _FORMATS.items() if shown[name] is not None)


class _Bar:
    """A bar of rich on a terminal until this object is deleted, else lines. No thread draws."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            auto_refresh=False,
            # Else it would lead to the terminal what the script writes to a file; a daemon has none.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self.is_live = self._bar.console.is_interactive
        self._task = self._bar.add_task("")
        if self.is_live:
            self._bar.start()
            finalize(self, self._bar.stop)  # at exit, too: it would leave a terminal without its cursor

    def update(self, steps: int, total: int | None, text: str) -> None:
        if self.is_live:
            self._bar.update(self._task, completed=steps, total=total, description=text, refresh=True)
        else:
            self._bar.console.print(text, highlight=False, soft_wrap=True)
