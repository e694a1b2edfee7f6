"""What a trainer knows of the data that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from accelcore.training.epochs import epochs
from accelcore.training.feeds import Feeds

__all__ = ["Reading"]


class Reading(ABC):
    """Gives a trainer its words for epochs and batches."""

    steps: int
    _feeds: Feeds

    @abstractmethod
    def flush(self) -> None:
        """Close a window that is not full."""

    @abstractmethod
    def _check_able(self) -> None:
        """Raise where the training cannot go on."""

    @property
    def epoch(self) -> int:
        """The epoch of `batches` that is under way, or comes next; counted from 0. Set, the next one is that."""
        return self._feeds.count_epochs(self.steps)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._feeds["train"].move_to(epoch)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs, counted from 0, that are left of `total`; where none is, the log says so."""
        return epochs(self._feeds["train"], total, speaks=self._feeds.speaks)

    def batches(self, loader: Iterable[Any], *, name: str = "train", shard: bool = True) -> Iterator[Any]:
        """One epoch of `loader`: on the device, this rank's share; at the end a short last window is flushed.

        After a `resume` in mid-epoch the first call yields what was left of that epoch. The batches before it are
        loaded again and dropped, which keeps random augmentation exact; save at an epoch's end where that costs too
        much. A position is counted from the batch that was last handed out, so save after training on it.

        An epoch that is left early, by `break` or an exception, is over. To be able to go on in the middle of it, save
        inside the loop.

        Args:
            loader: a DataLoader, over a map-style or iterable dataset, or any iterable of batches. In a job of several
                ranks one with a plain sampler is given a `DistributedSampler`; of an iterable, which every rank must
                read in the same order, each rank gets every `world_size`-th batch and an incomplete last round is
                dropped.
            name: which of several streams this is; each has a position of its own, and only `"train"` is
                flushed. To evaluate, read a loader through `accel.runtime.to_device`: sharing it out would repeat or
                drop rows to give all ranks as many.
            shard: False where the loader already yields this rank's share.
        """
        self._check_able()
        yield from self._feeds[name].batches(loader, shard=shard)
        if name == "train":
            self.flush()
