"""Sharing out data among the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from accelcore.errors import ConfigurationError
from accelcore.roles.collectives import Collectives

__all__ = ["share", "share_once"]

# What makes two DataLoaders alike, beside the dataset and the sampler.
_COPIED = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def share(loader: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """A rank's share of what `loader` yields, for training: all ranks have as many batches.

    Where it shuffles, all ranks have to be given the same seed: that of the sampler it is returned with.

    Raises:
        ConfigurationError: it has a sampler of its own.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return EveryNth(loader, rank, world_size)
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    if not _is_plain(loader):
        raise ConfigurationError(
            f"a {type(loader).__name__} with a sampler of its own cannot be shared out among {world_size} ranks",
            available="DataLoaders made with shuffle=True or False, or with a DistributedSampler",
            remedy="if it already yields this rank's share, say trainer.batches(loader, shard=False)",
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    return DataLoader(loader.dataset, sampler=sampler, **{name: getattr(loader, name) for name in _COPIED})


def share_once(loader: Iterable[Any], collectives: Collectives, device: torch.device) -> Iterable[Any]:
    """A rank's share of what `loader` yields, for evaluation: each row is in one rank's.

    Where it has rows, all ranks have as many batches, as far as there are rows for that, of up to `batch_size`; and
    where it does not shuffle, those of a rank are next to each other, so that all together are in order. Other streams,
    which all ranks have to read alike, are shared out by batches.
    """
    rank, world_size = collectives.rank, collectives.world_size
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return EveryNth(loader, rank, world_size, whole=False)
    rows: Sequence[Any] = range(len(loader.dataset))  # type: ignore[arg-type]
    if isinstance(loader.sampler, DistributedSampler) or _is_plain(loader):
        if loader.drop_last and not isinstance(loader.sampler, DistributedSampler):
            rows = rows[: len(loader) * loader.batch_size]
    else:
        rows = list(loader.sampler)
        if not all(type(row) is int for row in rows):
            return EveryNth(loader, rank, world_size, whole=False)
        size = int(collectives.broadcast(torch.tensor(len(rows), device=device)))
        own = torch.tensor((rows + [0] * size)[:size], device=device)  # which ranks may have drawn differently
        rows = collectives.broadcast(own).tolist()
    batches = -(-len(rows) // (world_size * loader.batch_size))
    mine = [batch for batch in _parts(_parts(rows, world_size)[rank], batches) if batch]
    options = {name: getattr(loader, name) for name in _COPIED if name not in ("batch_size", "drop_last")}
    return DataLoader(loader.dataset, batch_sampler=mine, **options)


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
    """A rank's share of a stream that every rank reads alike: its batch of each round of `world_size`.

    Args:
        whole: whether batches of a last round that is not full are given to nobody, so that all ranks take the same
            number of steps.
    """

    def __init__(self, stream: Iterable[Any], rank: int, world_size: int, *, whole: bool = True) -> None:
        self._stream, self._rank, self._world_size, self._whole = stream, rank, world_size, whole
        self.dataset = getattr(stream, "dataset", None)

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for number, batch in enumerate(self._stream):
            turn = number % self._world_size
            if turn == self._rank:
                mine = batch
            if turn == (self._world_size - 1 if self._whole else self._rank):
                yield mine

    def __len__(self) -> int:
        batches = len(self._stream)  # type: ignore[arg-type]  # where it has no length, neither has its share
        return (batches if self._whole else batches + self._world_size - 1 - self._rank) // self._world_size
