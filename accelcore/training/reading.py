"""A trainer's words for its data: epochs, batches, evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from accelcore.training.data_stream import Batches, DataStreams
from accelcore.training.evaluation import Evaluation
from accelcore.training.schedule import Schedule

__all__ = ["Reading"]


class Reading(ABC):
    """Gives a trainer its words for epochs and batches."""

    steps: int
    _streams: DataStreams
    _evaluation: Evaluation
    _schedule: Schedule

    @abstractmethod
    def flush(self) -> None:
        """Close a window that is not full."""

    @abstractmethod
    def _check_able(self) -> None:
        """Raise where the training cannot go on."""

    @abstractmethod
    def _check_model(self) -> None:
        """Raise where the model is no longer what the trainer was made for."""

    @property
    def epoch(self) -> int:
        """The epoch of `batches` that is under way, or comes next; counted from 0. Set, the next one is that.

        Under `schedule_by="epoch"` the script also brings the scheduler there, before it trains on.
        """
        return self._streams.current_epoch(self.steps)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._streams["train"].move_to(epoch)
        self._schedule.move_to(epoch)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs, counted from 0, that are left of `total`; where none is, the log says so."""
        return self._counted(self._streams["train"].epochs(total))

    def batches(self, loader: Iterable[Any], *, name: str = "train", shard: bool = True) -> Batches:
        """One epoch of `loader`: on the device, this rank's share; at the end a short last window is flushed.

        `len(trainer.batches(loader))` is how many batches that is, for a progress bar or a schedule.

        After a `resume` in mid-epoch the first call yields what was left of that epoch. The batches before it are
        loaded again and dropped, which keeps random augmentation exact; a loader with `state_dict` and
        `load_state_dict`, such as torchdata's StatefulDataLoader, goes on from its own state instead. A position is
        counted from the batch that was last handed out, so save after training on it.

        An epoch that is left early, by `break` or an exception, is over. To be able to go on in the middle of it, save
        inside the loop.

        Args:
            loader: a DataLoader, over a map-style or iterable dataset, or any iterable of batches. In a job of several
                ranks one with a plain sampler is given a `DistributedSampler`; of an iterable, which every rank must
                read in the same order, each rank gets every `world_size`-th batch, and of a `ShardedStream` its rows.
                All ranks get as many batches: with `drop_last=True` rows that are left over come to none, else some
                come twice.
            name: which of several streams this is; each has a position of its own, and only `"train"` is flushed.
            shard: False where the loader already yields this rank's share.
        """
        return Batches(self._train_on(loader, name, shard), lambda: self._streams[name].length(loader, shard=shard))

    def evaluate(self, loader: Iterable[Any]) -> Batches:
        """The batches of `loader`, to evaluate on: on the device, every row once over all ranks.

        In the loop the model is in evaluation mode, under `no_grad` and autocast; behind it all is as it was. Ranks may
        have different numbers of rows: put results together with `job.gather`, or add sums up. Where the loader does
        not shuffle, what is gathered behind the loop is in the order of its rows.

        Args:
            loader: a DataLoader, shared out by rows, whatever its sampler, as many batches for each rank; anything else
                by batches, of which some ranks may have one more, and all must read it in the same order. Every rank
                calls this.
        """
        return self._evaluation.batches(loader)

    def _train_on(self, loader: Iterable[Any], name: str, shard: bool) -> Iterator[Any]:
        self._check_able()
        stream = self._streams[name]
        if name == "train":  # an epoch that is left early is over; what the schedule raises then, Python would drop
            self._end_epochs()
            self._schedule.check()
            self._check_model()
        yield from stream.batches(loader, shard=shard)
        if name == "train":
            self.flush()
            self._end_epochs()

    def _counted(self, epochs: Iterator[int]) -> Iterator[int]:
        """The same epochs, and the schedule knows of those, too, whose batches are not read through `batches`."""
        for epoch in epochs:
            self._schedule.epochs_ended(epoch)
            yield epoch
        self._end_epochs()

    def _end_epochs(self) -> None:
        """Let the schedule know of the epochs that are over."""
        self._schedule.epochs_ended(self._streams["train"].epoch)
