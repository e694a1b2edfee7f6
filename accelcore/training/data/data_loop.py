"""Batches and epochs of one trainer, in step with its learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelcore.training.data.data_stream import Batches, DataStreams
from accelcore.training.schedule import Schedule

__all__ = ["DataLoop"]


class DataLoop:
    """Batches and epochs of one trainer, in step with its learning rate schedule.

    Args:
        streams: the data streams of the trainer.
        schedule: learns which epochs have ended.
    """

    def __init__(self, streams: DataStreams, schedule: Schedule) -> None:
        self._streams, self._schedule = streams, schedule

    def epoch(self, steps: int) -> int:
        """Return the current or next epoch, after `steps` windows; see `Trainer.epoch`."""
        return self._streams.current_epoch(steps)

    def move_to(self, epoch: int) -> None:
        """Let the next epoch be `epoch`."""
        self._streams["train"].move_to(epoch)
        self._schedule.move_to(epoch)

    def epochs(self, total: int) -> Iterator[int]:
        """Return the remaining epochs; see `Trainer.epochs`."""
        return self._scheduled(self._streams["train"].epochs(total))

    def batches(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        shard: bool,
        check: Callable[[], None],
        flush: Callable[[], None],
    ) -> Batches:
        """Return the batches of one epoch; see `Trainer.batches`.

        Args:
            loader, name, shard: see `Trainer.batches`.
            check: raises if the trainer can no longer train, or the model has changed since it was prepared.
            flush: closes the last window, which may be short.
        """

        def read() -> Iterator[Any]:
            check()
            if name == "train":
                # An epoch that was left early has ended. Python would drop an error of the schedule at that moment.
                self.end_epochs()
                self._schedule.check()
            yield from self._streams[name].batches(loader, shard=shard)
            if name == "train":
                flush()
                self.end_epochs()

        return Batches(read(), lambda: self._streams[name].length(loader, shard=shard))

    def end_epochs(self) -> None:
        """Tell the schedule which epochs have ended."""
        self._schedule.epochs_ended(self._streams["train"].epoch)

    def _scheduled(self, epochs: Iterator[int]) -> Iterator[int]:
        # The batches of an epoch may be read without `batches`.
        for epoch in epochs:
            self._schedule.epochs_ended(epoch)
            yield epoch
        self.end_epochs()
