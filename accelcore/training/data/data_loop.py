"""Batches and epochs of one trainer, in step with its learning rate schedule; and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelcore.training.data.data_stream import Batches, DataStreams
from accelcore.training.data.sharding import share_once
from accelcore.training.schedule import Schedule

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["DataLoop", "evaluate"]


class DataLoop:
    """Batches and epochs of one trainer, in step with its learning rate schedule.

    Args:
        streams: the data streams of the trainer.
        schedule: learns which epochs have ended.
    """

    # It keeps no method of the trainer: a reference cycle would keep the device's memory until garbage collection.
    def __init__(self, streams: DataStreams, schedule: Schedule) -> None:
        self._streams, self._schedule = streams, schedule

    def move_to(self, epoch: int) -> None:
        """Let the next epoch be `epoch`."""
        self._streams["train"].move_to(epoch)
        self._schedule.move_to(epoch)

    def epochs(self, total: int) -> Iterator[int]:
        """Return the remaining epochs; see `Trainer.epochs`."""
        return self._scheduled(self._streams["train"].epochs(total))

    def batches(
        self, loader: Iterable[Any], *, name: str, shard: bool, check: Callable[[], None], flush: Callable[[], None]
    ) -> Batches:
        """Return the batches of one epoch, see `Trainer.batches`; `flush` closes the last window, full or not."""

        def read() -> Iterator[Any]:
            check()
            if name == "train":
                # An epoch that was left early has ended. Python would drop an error of the schedule at that moment.
                self._end_epochs()
                self._schedule.check()
            yield from self._streams[name].batches(loader, shard=shard)
            if name == "train":
                flush()
                self._end_epochs()

        return Batches(read(), lambda: self._streams[name].length(loader, shard=shard))

    def _end_epochs(self) -> None:
        self._schedule.epochs_ended(self._streams["train"].epoch)

    def _scheduled(self, epochs: Iterator[int]) -> Iterator[int]:
        # The batches of an epoch may be read without `batches`.
        for epoch in epochs:
            self._schedule.epochs_ended(epoch)
            yield epoch
        self._end_epochs()


def evaluate(
    backend: Backend, model: nn.Module, region: Callable[[], AbstractContextManager[object]], loader: Iterable[Any]
) -> Batches:
    """Return this rank's share of `loader`; `region` makes a context for a forward pass. See `Trainer.evaluate`."""
    job = backend.collectives

    def share() -> Iterable[Any]:
        return loader if job.world_size == 1 else share_once(loader, job, backend.device)

    def read() -> Iterator[Any]:
        training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            for batch in share():
                moved = backend.runtime.to_device(batch)
                with torch.no_grad(), region():  # not around the loader, which may compute too
                    yield moved
        finally:
            model.train(training[model])  # a subclass may override it; the flags of its submodules are restored below
            for module, before in training.items():
                module.training = before

    return Batches(read(), lambda: len(share()))  # type: ignore[arg-type]
