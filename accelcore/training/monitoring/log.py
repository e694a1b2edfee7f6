"""Log of a training: JSON lines, a plot of them, TensorBoard and Weights & Biases."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import torch
from torch import Tensor

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError, TrainingError, logger
from accelcore.training.monitoring.progress import Meter
from accelcore.training.monitoring.records import FILE, draw, line_of, read_records
from accelcore.training.trainer import Trainer
from accelcore.util.containers import item
from accelcore.util.files import replace_file
from accelcore.util.text import is_number, is_whole

_OLD = "log-before{}.jsonl"
_OWN = ("step", "epoch", "loss", "lr", "gradient_norm", "rows_per_second", "memory_peak", "seconds")

Sink = tuple[Callable[[dict[str, Any], int], object], Callable[[], object]]
"""Functions that take the figures of a step, and that close what took them."""


class Log(Meter):
    """Log of a training in a folder: `log.jsonl`, and plots of it, `plot.png` and `plot.html`.

    The main rank writes a line every few steps, a JSON object: `step`; `epoch`, counted from 0; `loss`, the mean over
    this rank's micro-batches since the last line or a resume; `lr` of the first group in the step; `gradient_norm` of
    the step; `rows_per_second` of all ranks within epochs; `memory_peak` in bytes; `seconds` since the log was made. A
    value that is not finite is null. A step does not wait for the device: a line is written one step later.

    After a resume, lines after the resumed step are dropped, and the log continues. A run from the start renames an
    older log to `log-before.jsonl`, or `log-before-2.jsonl` and so on. The log draws its plot at exit, except after
    Ctrl-C, and by `close()`; `accelcore plot FOLDER` draws it at any time.

    Example:
        >>> log = accelcore.Log("outputs/run", every=10)
        >>> trainer = accel.trainer(model, optimizer, loss=loss, observers=[log])
        >>> log.write(accuracy=0.9)  # a line of your own

    Args:
        folder: made if it does not exist; one for each run.
        every: steps between two lines.
        gradient_norm: whether the norm is computed for the log, which reads all gradients once a step. With
            `clip_norm=` it is computed anyway, and logged. With `graph=True` it is never logged.
        plot: False for no plot. None: a plot if matplotlib is installed.
        tensorboard: whether the figures also go to TensorBoard, with files in `folder`.
        wandb: whether they also go to Weights & Biases; or the arguments of `wandb.init`. A resumed run continues the
            run of this folder there.

    Raises:
        ConfigurationError: an option has a wrong value, what it needs is not installed, the folder cannot be written,
            or an older log is damaged.
        TrainingError: a line cannot be written, such as on a full disk.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 25,
        gradient_norm: bool = False,
        plot: bool | None = None,
        tensorboard: bool = False,
        wandb: bool | Mapping[str, Any] = False,
    ) -> None:
        if not is_whole(every, 1):
            raise ConfigurationError(f"every={every!r} is not a number of steps", remedy="give 1 or more")
        needs = {"matplotlib": bool(plot), "tensorboard": bool(tensorboard), "wandb": wandb is not False}
        missing = [package for package, wanted in needs.items() if wanted and find_spec(package) is None]
        if missing:
            raise ConfigurationError(
                f"the log needs what is not installed: {', '.join(missing)}", remedy=f"pip install {' '.join(missing)}"
            )
        self.measures_norm = gradient_norm
        self._folder, self._every, self._plot = as_path(folder).absolute(), every, plot
        self._tensorboard, self._wandb = tensorboard, wandb
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._read: Callable[[], dict[str, float]] | None = None
        self._line: dict[str, Any] = {}
        self._next = self._last = -1
        self._file: TextIO | None = None
        self._sinks: list[Sink] = []
        self._start = perf_counter()

    def begin(self, trainer: Trainer) -> None:
        logs = [each for each in trainer.options["observers"] if isinstance(each, Log)]
        if any(each is not self and each._folder == self._folder for each in logs):
            raise ConfigurationError(f"two logs have the folder {self._folder}", remedy="give each log its own folder")
        super().begin(trainer)

    def loss(self, loss: Tensor) -> None:
        if self._is_main:
            self._losses.append(loss)

    def gradient_norm(self, norm: Tensor) -> None:
        self._norm = norm

    def step(self, steps: int) -> None:
        if not self._is_main:
            return
        if steps != self._last + 1:
            self._open(steps - 1)
        self._last = steps
        if self._read is not None:
            self._flush()
        if steps >= self._next:
            self._report()

    def epoch_end(self, epoch: int) -> None:
        super().epoch_end(epoch)
        if self._is_main and self._last == self._total:
            self._report()
            self._flush()

    def write(self, **values: float | Tensor) -> None:
        """Write a line of figures of your own, such as `accuracy=0.9`, at the present step. Any rank may call it.

        Args:
            values: numbers, or tensors of one element.

        Raises:
            ConfigurationError: a value has a name of the log's own figures, or is not a number; or the log was given to
                no trainer.
        """
        found = {name: item(value) for name, value in values.items()}
        for name, value in found.items():
            if name in _OWN:
                raise ConfigurationError(
                    f"{name}= is a figure that the log writes itself",
                    available="any name but " + ", ".join(_OWN),
                    remedy=f"give another name, such as valid_{name}",
                )
            if not is_number(value):
                raise ConfigurationError(f"{name}={value!r} is not a number", remedy="give a number, such as a mean")
        if self._trainer is None:
            raise ConfigurationError("this log has no trainer", remedy="give it to one: observers=[log]")
        if not self._is_main:
            return
        steps = self._trainer.steps
        if steps != self._last or self._file is None:
            self._open(steps)
        self._flush()
        self._put({"step": steps, "epoch": self._epoch, **found})

    def close(self) -> None:
        """Write what is not yet written, and draw the plot. Later steps open the log again."""
        if self._file is None:
            return
        self._report()
        self._flush()
        self._close_files()
        if self._plot is False or (self._plot is None and find_spec("matplotlib") is None):
            return
        try:
            draw({self._folder.name: read_records(self._folder)}, self._folder / "plot.png", self._folder / "plot.html")
        except ConfigurationError as error:  # the training is done
            logger.warning("no plot of %s: %s", self._folder / FILE, error)

    def _close_at_exit(self) -> None:
        """Close; draw nothing after Ctrl-C: Python ends with 1 instead of by SIGINT if an exit function imports."""
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self._plot = False
        self.close()

    def _open(self, done: int) -> None:
        """Open the files for the steps after `done`."""
        self._close_files()
        self._losses, self._read = self._losses[-self._accumulate :], None
        self._last, self._next = done, (done // self._every + 1) * self._every
        path = self._folder / FILE
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and done:
                kept = [line_of(record) for record in read_records(self._folder) if record["step"] <= done]
                replace_file(path, "".join(kept).encode())
            elif path.exists():
                names = (_OLD.format(f"-{number}" if number > 1 else "") for number in count(1))
                old = next(name for name in names if not (self._folder / name).exists())
                path.replace(self._folder / old)
                logger.warning("%s has the log of another run, which is %s now", self._folder, old)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"no log can be written in {self._folder}", why=str(error), remedy="give a folder that you may write to"
            ) from error
        if self._tensorboard:
            self._sinks.append(_tensorboard(self._folder, done))
        if self._wandb is not False:
            self._sinks.append(_wandb(self._folder, done, {} if self._wandb is True else self._wandb))
        # Last, so that it is called first: wandb, too, ends its run at exit, and then takes no more figures.
        atexit.register(self._close_at_exit)

    def _close_files(self) -> None:
        atexit.unregister(self._close_at_exit)
        for _, close in self._sinks:
            close()
        self._sinks = []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _report(self) -> None:
        """Begin a line for the steps since the last one, if there are any; `_flush` completes it."""
        if not self._losses:
            return
        loss = torch.stack(self._losses).mean(dtype=torch.float32)
        self._flush()
        self._read = self._begin_to_read(loss=loss, gradient_norm=self._norm)
        self._line = {
            "step": self._last,
            "epoch": self._epoch,
            **dict.fromkeys(("loss", "lr", "gradient_norm")),
            "rows_per_second": self._rows_per_second(),
            "memory_peak": self._backend.runtime.memory().peak,
            "seconds": perf_counter() - self._start,
        }
        self._losses, self._norm = [], None
        self._next = (self._last // self._every + 1) * self._every

    def _flush(self) -> None:
        """Complete the line that was begun, if there is one; wait for its figures."""
        if self._read is not None:
            read, self._read = self._read(), None
            self._put(self._line | read)

    def _put(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "it is open while there are steps"
        values = {name: value for name, value in record.items() if value is not None}
        try:
            self._file.write(line_of(values))
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            with suppress(OSError):  # closing tries once more to write the line
                file.close()
            raise TrainingError(
                f"the log {file.name} cannot be written",
                why=str(error),
                remedy="make room or give another folder, and resume; training does not need its log",
            ) from error
        step = values.pop("step")
        for write, _ in self._sinks:
            write(values, step)


def _tensorboard(folder: Path, done: int) -> Sink:
    """Write event files in a folder. TensorBoard hides what was written after the steps that are `done`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=done + 1)
    return lambda figures, step: [writer.add_scalar(*figure, step) for figure in figures.items()], writer.close


def _wandb(folder: Path, done: int, options: Mapping[str, Any]) -> Sink:
    """Write a run of Weights & Biases. If steps are `done`, continue the run whose name is in the folder."""
    file = folder / "wandb-id"
    known = {"id": file.read_text(encoding="utf-8"), "resume": "allow"} if done and file.exists() else {}
    run = import_module("wandb").init(**{"dir": str(folder), **known, **options})
    file.write_text(run.id, encoding="utf-8")
    return lambda figures, step: run.log(figures, step=step), run.finish
