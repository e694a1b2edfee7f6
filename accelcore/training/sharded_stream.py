"""An iterable dataset that is divided among the ranks of a job and the workers of each rank's loader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from accelcore.errors import ConfigurationError
from accelcore.training.rounds import Last, rounds

__all__ = ["ShardedStream"]


class ShardedStream(IterableDataset[Any]):
    """The rows of an iterable dataset, each in one worker of one rank: `DataLoader(ShardedStream(rows), 32, ...)`.

    For datasets that do not divide themselves. torch gives every worker of a loader, and every rank, all rows of such
    a dataset. Here each still reads the dataset to its end, but keeps, collates and sends only the rows that are its
    own. All must read it in the same order: what shuffles it takes a generator of its own, seeded alike everywhere,
    such as by the epoch, which `set_epoch` is told.

    `trainer.batches` and `trainer.evaluate` see to the ranks. In a loop of one's own, say which rank this is.

    Args:
        dataset: anything that can be iterated over once an epoch.
        rank: which rank's rows these are.
        world_size: among how many they are divided; 1 where `trainer.batches` is to divide them.
        last: what becomes of the last rows, where they are no multiple of `world_size`: `"repeat"` gives ranks that
            would get none the first of these rows again, `"drop"` leaves them out, `"uneven"` gives some ranks one
            row more. `trainer.batches` goes by the loader's `drop_last`.

    Raises:
        ConfigurationError: `rank` is none of `world_size`.
    """

    def __init__(self, dataset: Any, *, rank: int = 0, world_size: int = 1, last: Last = "repeat") -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"rank={rank} is none of world_size={world_size} ranks")
        self.dataset, self.rank, self.world_size, self.last = dataset, rank, world_size, last

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rows = rounds(self.dataset, self.rank, self.world_size, self.last)
        return rows if worker is None else islice(rows, worker.id, None, worker.num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch comes, if it wants to know."""
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)
