"""Sharing out data among the ranks of a job."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from accelcore.errors import ConfigurationError
from accelcore.roles.collectives import Collectives
from accelcore.training.rounds import Last, rounds
from accelcore.training.sharded_stream import ShardedStream

__all__ = ["EveryNth", "share", "share_once"]

# What makes two DataLoaders alike, beside the dataset, the sampler, and what workers do when they start.
_COPIED = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def share(loader: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """A rank's share of what `loader` yields, for training: all ranks have as many batches.

    Where it shuffles, it is returned with a DistributedSampler, whose seed the caller makes the same on all ranks.

    Raises:
        ConfigurationError: it has a sampler of its own, or divides itself for another job.
    """
    last: Last = "drop" if getattr(loader, "drop_last", False) else "repeat"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return _share_of_stream(loader, rank, world_size, last)
    if isinstance(loader.sampler, DistributedSampler):
        _check_place("DistributedSampler", loader.sampler.rank, loader.sampler.num_replicas, (rank, world_size))
        plain = type(loader) is DataLoader and loader.batch_size is not None and loader.num_workers
        return _again(loader, rank, sampler=loader.sampler) if plain else loader
    if not _is_plain(loader):
        raise ConfigurationError(
            f"this {type(loader).__name__} cannot be shared out among {world_size} ranks",
            why="it has a sampler or a class of its own",
            available="DataLoaders made with shuffle=True or False, and any with a DistributedSampler",
            remedy="make it with sampler=DistributedSampler(data, num_replicas=job.world_size, rank=job.rank); if it "
            "already yields this rank's share, say trainer.batches(loader, shard=False)",
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    return _again(loader, rank, sampler=sampler)


def share_once(loader: Iterable[Any], collectives: Collectives, device: torch.device) -> Iterable[Any]:
    """A rank's share of what `loader` yields, for evaluation: each row is in one rank's.

    Where it has rows, all ranks have as many batches, as far as there are rows for that, of up to `batch_size`; and
    where it does not shuffle, those of a rank are next to each other, so that all together are in order. Other streams,
    which all ranks have to read alike, are shared out by batches.
    """
    rank, world_size = collectives.rank, collectives.world_size
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return _share_of_stream(loader, rank, world_size, "uneven")
    rows: Sequence[Any] = range(len(loader.dataset))  # type: ignore[arg-type]
    if isinstance(loader.sampler, DistributedSampler) or _is_plain(loader):
        if loader.drop_last and not isinstance(loader.sampler, DistributedSampler):
            rows = rows[: len(loader) * loader.batch_size]
    else:
        rows = list(loader.sampler)
        if not all(type(row) is int for row in rows):
            return EveryNth(loader, rank, world_size, "uneven")
        size = int(collectives.broadcast(torch.tensor(len(rows), device=device)))
        drawn = torch.tensor((rows + [0] * size)[:size], device=device)  # another order, perhaps, on other ranks
        rows = collectives.broadcast(drawn).tolist()
    batches = -(-len(rows) // (world_size * loader.batch_size))
    batches_of_rank = [batch for batch in _parts(_parts(rows, world_size)[rank], batches) if batch]
    return _again(loader, rank, batch_sampler=batches_of_rank)


def _share_of_stream(loader: Iterable[Any], rank: int, world_size: int, last: Last) -> Iterable[Any]:
    stream = getattr(loader, "dataset", None)
    if isinstance(stream, ShardedStream) and stream.world_size > 1:
        _check_place("ShardedStream", stream.rank, stream.world_size, (rank, world_size))
        return loader
    if type(loader) is DataLoader and type(stream) is ShardedStream:
        of_rank = ShardedStream(stream.dataset, rank=rank, world_size=world_size, last=last)
        return _again(loader, 0, dataset=of_rank)  # all ranks have to read it alike, also where it draws at random
    return EveryNth(loader, rank, world_size, last)


def _check_place(what: str, rank: int, world_size: int, job: tuple[int, int]) -> None:
    if (rank, world_size) != job:
        raise ConfigurationError(
            f"the {what} divides the data for rank {rank} of {world_size}, and this is rank {job[0]} of {job[1]}",
            why="rows would be lost, or come on several ranks",
            remedy="make it inside `with accel.distributed() as job:`, of job.rank and job.world_size",
        )


def _again(loader: DataLoader[Any], rank: int, **of_rank: Any) -> DataLoader[Any]:
    """A loader like this one with another dataset or sampler, whose workers draw random numbers of the rank's own."""
    options = {name: getattr(loader, name) for name in _COPIED}
    if "batch_sampler" not in of_rank:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    start = _StartWorker(rank, loader.worker_init_fn) if rank else loader.worker_init_fn
    return DataLoader(**{"dataset": loader.dataset, "worker_init_fn": start, **options, **of_rank})


class _StartWorker:
    """Seeds a loader's worker by its number among those of all ranks.

    torch seeds it by its number on its rank and a number that is drawn there, the same one on ranks that are seeded
    alike: the first workers of all ranks would crop their pictures alike. Those of rank 0 are as torch seeds them.
    """

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self._rank, self._then = rank, then

    def __call__(self, number: int) -> None:
        import numpy as np  # here: who has no workers need not wait for it

        worker = get_worker_info()
        assert worker is not None, "workers of loaders call this"
        seed = worker.seed + self._rank * worker.num_workers
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32)])  # as torch seeds it
        if self._then is not None:
            self._then(number)


def _parts(rows: Sequence[Any], count: int) -> list[list[Any]]:
    """Rows in `count` parts of nearly one length."""
    return [list(rows[len(rows) * n // count : len(rows) * (n + 1) // count]) for n in range(count)]


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader takes all of its dataset, shuffled or not, so that a DistributedSampler can share it out."""
    sampler = loader.sampler
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return whole and sampler.generator in (None, loader.generator)
    return type(sampler) is SequentialSampler


class EveryNth:
    """A rank's share of a stream of batches that every rank reads alike.

    Attributes:
        stream: the whole of it.
    """

    def __init__(self, stream: Iterable[Any], rank: int, world_size: int, last: Last) -> None:
        self.stream, self._rank, self._world_size, self._last = stream, rank, world_size, last

    def __iter__(self) -> Iterator[Any]:
        return self.of_rank(iter(self.stream))

    def of_rank(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The rank's share of these batches of the stream."""
        return rounds(batches, self._rank, self._world_size, self._last)

    def __len__(self) -> int:
        batches = len(self.stream)  # type: ignore[arg-type]  # where it has no length, neither has its share
        more = {"repeat": self._world_size - 1, "drop": 0, "uneven": self._world_size - 1 - self._rank}[self._last]
        return (batches + more) // self._world_size
