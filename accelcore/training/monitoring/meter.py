"""Base of the observers of a whole training: its trainer, its epoch, and rows a second."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.training.observers import Observer
from accelcore.util.containers import rows
from accelcore.util.trial import requested_trial

if TYPE_CHECKING:
    from accelcore.training.trainer import Trainer

__all__ = ["Meter"]


class Meter(Observer):
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

    def _rows_per_second(self) -> float | None:
        """Return the rows of all ranks a second since the last call; None if they are not known."""
        now = perf_counter()
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        found = self._rows * self._ranks / seconds if self._rows and seconds else None
        self._rows, self._seconds = 0, 0.0
        self._since = None if self._since is None else now
        return found

    def _begin_to_read(self, **tensors: Tensor | None) -> Callable[[], dict[str, float]]:
        """Begin to copy scalars and the learning rate of the next update; return a function that waits for them."""
        given: dict[str, Any] = dict(tensors)
        with suppress(ReferenceError):  # at exit the trainer may be gone
            assert self._trainer is not None, "begin comes first"
            given["lr"] = self._trainer.optimizer.param_groups[0]["lr"]
        fetch = self._backend.runtime.fetch
        waiting = {name: fetch(value) if isinstance(value, Tensor) else value for name, value in given.items()}

        def read() -> dict[str, float]:
            found = {name: value().item() if callable(value) else value for name, value in waiting.items()}
            return {name: value for name, value in found.items() if value is not None}

        return read
