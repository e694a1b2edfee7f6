"""Log of a training: JSON lines, a plot of them, TensorBoard and Weights & Biases."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelcore.checkpoint.folders import as_path
from accelcore.errors import ConfigurationError, TrainingError, logger
from accelcore.training.monitoring.progress import Meter
from accelcore.training.monitoring.records import FILE, draw, line_of, read_records, require
from accelcore.util.containers import item
from accelcore.util.files import remedy_of_writing, replace_file
from accelcore.util.text import is_number, is_whole

if TYPE_CHECKING:
    from typing_extensions import Never

_OWN = ("step", "epoch", "loss", "lr", "gradient_norm", "rows_per_second", "memory_peak", "seconds")

Sink = Callable[[dict[str, Any], int], object]
"""Takes the figures of a step, and its number."""


class Log(Meter):
    """Log of a training in a folder: `log.jsonl`, and plots of it, `plot.png` and `plot.html`.

    The main rank writes a line every few steps, a JSON object: `step`; `epoch`, counted from 0; `loss`, the mean over
    this rank's micro-batches since the last line or a resume; `lr` of the first group in the step; `gradient_norm` of
    the step; `rows_per_second` of all ranks within epochs; `seconds` since the trainer was made; `memory_peak` in
    bytes. A value that is not finite is null. A step does not wait for the device: a line is written one step later.

    After a resume, lines after the resumed step are dropped, and the log continues. A run from the start renames an
    older log: its new name has the time. The log draws its plot at exit, except after Ctrl-C, and by `close()`;
    `accelcore plot FOLDER` draws it at any time.

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
        ConfigurationError: an option has a wrong value, what it needs is not installed, or an older log is damaged.
        TrainingError: the folder or a line cannot be written, such as on a full disk.
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
        require(*[package for package, wanted in needs.items() if wanted])
        self.measures_norm = gradient_norm
        self._folder, self._every = as_path(folder).absolute(), every
        self._plot = find_spec("matplotlib") is not None if plot is None else plot
        self._tensorboard, self._wandb = tensorboard, wandb
        self._last = -1
        self._is_open = False
        self._sinks: list[Sink] = []
        self._closing = ExitStack()

    def step(self, steps: int) -> None:
        if self._is_main:
            self._open(steps - 1)
        self._last = steps
        super().step(steps)

    def write(self, *unnamed: Never, **values: float | Tensor) -> None:
        """Write a line of figures of your own, such as `accuracy=0.9`, at the present step. Any rank may call it.

        Args:
            values: numbers, or tensors of one element.

        Raises:
            ConfigurationError: a value has no name or a name of the log's own figures, or is not a number; or the log
                was given to no trainer.
        """
        if unnamed:
            raise ConfigurationError("log.write(...) takes figures by name", remedy="log.write(**figures)")
        found = {name: item(value) for name, value in values.items()}
        for name, value in found.items():
            if not is_number(value):
                remedy = "give a number, such as accuracy.mean().item()"
                raise ConfigurationError(f"{name}={value!r} is not a number", remedy=remedy)
            if name in _OWN:
                raise ConfigurationError(
                    f"{name}={value!r} is not a figure of your own",
                    why="the log writes this figure itself",
                    remedy=f"choose another word, such as valid_{name}=",
                )
        if not hasattr(self, "_trainer"):
            raise ConfigurationError("this log has no trainer", remedy="give it to one: observers=[log]")
        if self._is_main:
            self._open(self._trainer.steps)
            self._finish()
            self._put({"step": self._last, "epoch": self._epoch, **found})

    def close(self) -> None:
        """Write what is not yet written, and draw the plot. Later steps open the log again."""
        if not self._is_open:
            return
        self._finish()
        self._collect(self._last)
        self._finish()
        self._is_open = False
        self._closing.close()
        if self._plot:
            paths = self._folder / "plot.png", self._folder / "plot.html"
            try:
                draw({self._folder.name: read_records(self._folder)}, *paths)
            except ConfigurationError as error:  # the training is done
                logger.warning("no plot of %s: %s", self._folder / FILE, error)

    def _close_at_exit(self) -> None:
        """Close; draw nothing after Ctrl-C: Python ends with 1 instead of by SIGINT if an exit function imports."""
        if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
            self._plot = False
        self.close()

    def _open(self, done: int) -> None:
        """Open the log, unless it is at `done` steps: drop what an earlier run has written of later ones."""
        if self._is_open and done == self._last:
            return
        self._closing.close()
        while len(self._losses) > self._trainer.accumulate:  # those before a resume
            self._losses.popleft()
        self._read, self._last, self._sinks = None, done, []
        path = self._folder / FILE
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and done:
                kept = [line_of(record) for record in read_records(self._folder) if record["step"] <= done]
                replace_file(path, "".join(kept).encode())
            elif path.exists():
                old = path.with_name(f"log-before-{datetime.now():%Y%m%d-%H%M%S-%f}.jsonl")
                path.replace(old)
                logger.warning("%s has the log of another run, which is %s now", self._folder, old.name)
            path.touch()  # so that a second log of this folder renames it, and warns
        if self._tensorboard:
            self._sinks.append(_tensorboard(self._folder, done, self._closing))
        if self._wandb is not False:
            self._sinks.append(_wandb(self._folder, done, {} if self._wandb is True else self._wandb, self._closing))
        # Last, so that it is called first: wandb, too, ends its run at exit, and then takes no more figures.
        atexit.register(self._close_at_exit)
        self._closing.callback(atexit.unregister, self._close_at_exit)

    def _is_due(self, steps: int) -> bool:
        return steps % self._every == 0

    def _show(self, figures: dict[str, Any]) -> None:
        self._put({**figures, "memory_peak": self._backend.runtime.memory().peak})

    def _put(self, figures: dict[str, Any]) -> None:
        known = {name: value for name, value in figures.items() if value is not None}
        with self._writing(), (self._folder / FILE).open("a", encoding="utf-8") as file:
            file.write(line_of(known))
        step = known.pop("step")
        for write in self._sinks:
            write(known, step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert errors of the file system to a TrainingError. The log is open unless there was one."""
        self._is_open = False
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"the log {self._folder / FILE} cannot be written",
                why=str(error),
                remedy=f"{remedy_of_writing(error)}. Then resume; training does not need its log",
            ) from error
        self._is_open = True


def _tensorboard(folder: Path, done: int, closing: ExitStack) -> Sink:
    """Write event files in a folder. TensorBoard hides what was written after the steps that are `done`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=done + 1)
    closing.callback(writer.close)
    return lambda figures, step: [writer.add_scalar(*figure, step) for figure in figures.items()]


def _wandb(folder: Path, done: int, options: Mapping[str, Any], closing: ExitStack) -> Sink:
    """Write a run of Weights & Biases. If steps are `done`, continue the run whose name is in the folder."""
    file = folder / "wandb-id"
    known = {"id": file.read_text(encoding="utf-8"), "resume": "allow"} if done and file.exists() else {}
    run = import_module("wandb").init(**{"dir": str(folder), **known, **options})
    file.write_text(run.id, encoding="utf-8")
    closing.callback(run.finish)
    return lambda figures, step: run.log(figures, step=step)
