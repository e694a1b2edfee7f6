"""An iterable dataset that is divided among the ranks of a job and the workers of each rank's loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from accelcore.errors import ConfigurationError

__all__ = ["Last", "ShardedStream", "rounds"]

Item = TypeVar("Item")

Last = Literal["repeat", "drop", "uneven"]
"""A last round that is not full: `"repeat"` gives its first item to the ranks without one; `"drop"` leaves the round
out; `"uneven"` gives some ranks one item more than others."""


def rounds(items: Iterable[Item], rank: int, world_size: int, last: Last) -> Iterator[Item]:
    """Yield a rank's item of each round of `world_size` items, from a stream that all ranks read alike.

    Unless `last` is `"uneven"`, all ranks get the same number of items. An item is then yielded when its round was
    read to the end, so that all ranks are at the same place in the stream.
    """
    gives_at = rank if last == "uneven" else world_size - 1
    place = world_size - 1
    for number, item in enumerate(items):
        place = number % world_size
        if place in (0, rank):
            held = item
        if place == gives_at:
            yield held
    if last == "repeat" and place != world_size - 1:
        yield held


class ShardedStream(IterableDataset[Any]):
    """The rows of an iterable dataset, each in one worker of one rank: `DataLoader(ShardedStream(rows), 32, ...)`.

    For datasets that do not divide themselves. torch gives every worker of a loader, and every rank, all rows of such
    a dataset. Here each worker still reads the whole dataset, but keeps, collates and sends only its own rows. All
    must read it in the same order: a dataset that shuffles needs its own generator, seeded alike everywhere, for
    example by the epoch that `set_epoch` passes on.

    `trainer.batches` and `trainer.evaluate` divide the rows among the ranks. In your own loop, give `rank` and
    `world_size`.

    Args:
        dataset: anything that can be iterated over once an epoch.
        rank: the rank that gets these rows.
        world_size: the number of ranks; 1 if `trainer.batches` is to divide the rows.
        last: what to do if the number of rows is not a multiple of `world_size`. `"repeat"` gives the ranks that would
            get none the first of the last rows again, `"drop"` leaves the last rows out, `"uneven"` gives some ranks
            one row more. `trainer.batches` goes by the loader's `drop_last`.

    Raises:
        ConfigurationError: `rank` is not below `world_size`.
    """

    def __init__(self, dataset: Any, *, rank: int = 0, world_size: int = 1, last: Last = "repeat") -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank={rank} does not exist among world_size={world_size} ranks",
                remedy="give job.rank and job.world_size",
            )
        self.dataset, self.rank, self.world_size, self.last = dataset, rank, world_size, last

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        rows = rounds(self.dataset, self.rank, self.world_size, self.last)
        return rows if worker is None else islice(rows, worker.id, None, worker.num_workers)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the dataset, if it has `set_epoch`."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
