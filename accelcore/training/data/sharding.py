"""Divide data among the ranks of a job, and among the workers of each rank's loader, to train and to evaluate."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import GeneratorType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accelcore.errors import ConfigurationError, DistributedError
from accelcore.jobs.collectives import Collectives
from accelcore.util.text import kind_of

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


class Batches(Iterator[Any]):
    """Batches of one epoch, to be iterated over once.

    The length is that of a whole epoch; after a resume within it, fewer are left.
    """

    _made_by = "trainer.batches(loader)"

    def __init__(self, batches: Iterator[Any], length: Callable[[], int]) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:  # noqa: PYI034
        if isinstance(self._batches, GeneratorType) and self._batches.gi_frame is None:
            raise ConfigurationError(
                f"these batches were read before, and can be read once: call {self._made_by} again",
                remedy=f"write `for batch in {self._made_by}:`, in each epoch",
            )
        return self._batches  # not self: the loop then calls the inner iterator directly

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return self._length()


class ShardedStream(IterableDataset[Any]):
    """The rows of an iterable dataset, each in one worker of one rank: `DataLoader(ShardedStream(rows), 32, ...)`.

    For datasets that do not divide themselves. torch gives every worker of a loader, and every rank, all rows of such
    a dataset. Here each worker still reads the whole dataset, but keeps, collates and sends only its own rows. All
    must read it in the same order: a dataset that shuffles needs its own generator, seeded alike everywhere, for
    example by the epoch that `set_epoch` passes on.

    `trainer.batches` and `trainer.evaluate` divide the rows among the ranks. In your own loop, give `rank` and
    `world_size`.

    Example:
        >>> stream = accelcore.ShardedStream(torch.arange(12.0).view(3, 4))
        >>> for rows in trainer.batches(torch.utils.data.DataLoader(stream, 2)):
        ...     value = trainer(rows)

    Args:
        dataset: anything that can be iterated over once an epoch.
        rank: the rank that gets these rows.
        world_size: the number of ranks; 1 if `trainer.batches` is to divide the rows.
        last: what to do if the number of rows is not a multiple of `world_size`. `"repeat"` gives the ranks that would
            get none the first of the last rows again, `"drop"` leaves the last rows out, `"uneven"` gives some ranks
            one row more. `trainer.batches` goes by the loader's `drop_last`.
    """

    def __init__(self, dataset: Any, *, rank: int = 0, world_size: int = 1, last: Last = "repeat") -> None:
        if not 0 <= rank < world_size:
            remedy = "give job.rank and job.world_size"
            raise ConfigurationError(f"rank={rank} does not exist among world_size={world_size} ranks", remedy=remedy)
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


_COPIED = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip
"""The options that a copy of a DataLoader takes over, besides dataset, sampler and worker_init_fn."""


def check_loader(loader: object) -> None:
    """Raise ConfigurationError for a dataset, a tensor of rows, or another value that does not yield batches."""
    of_rows = isinstance(loader, Tensor) or (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset))
    if of_rows or isinstance(loader, str) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        what = "yields rows, not batches" if of_rows else "is not a loader of batches"
        raise ConfigurationError(f"{kind_of(loader)} {what}", remedy="pass DataLoader(dataset, batch_size=...)")


def share(loader: Iterable[Any], rank: int, world_size: int) -> Iterable[Any]:
    """Return a rank's share of `loader` for training, with the same number of batches on all ranks.

    The share of a loader that shuffles has a new DistributedSampler; the caller gives it one seed on all ranks.
    """
    last: Last = "drop" if getattr(loader, "drop_last", False) else "repeat"
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return _share_of_stream(loader, rank, world_size, last)
    if isinstance(loader.sampler, DistributedSampler):
        _check_rank("DistributedSampler", loader.sampler.rank, loader.sampler.num_replicas, (rank, world_size))
        plain = type(loader) is DataLoader and loader.batch_size is not None and loader.num_workers
        return _copy_of(loader, rank, sampler=loader.sampler) if plain else loader
    if not _is_plain(loader):
        raise ConfigurationError(
            f"this {type(loader).__name__} cannot be divided among {world_size} ranks",
            why=_what_is_own(loader),
            available="DataLoaders made with shuffle=True or False, and any with a DistributedSampler",
            remedy=_DRAW_ON_EACH_RANK if isinstance(loader.sampler, WeightedRandomSampler) else _DIVIDE,
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
    )
    return _copy_of(loader, rank, sampler=sampler)


def share_once(
    loader: Iterable[Any], rank: int, world_size: int, draw: Callable[[Any], Sequence[Any] | None]
) -> Iterable[Any]:
    """Return a rank's share of `loader` for evaluation: each row comes to exactly one rank.

    A map-style loader is divided by rows, into the same number of batches for each rank as far as the rows suffice. If
    it does not shuffle, a rank gets consecutive rows, so that the ranks' results in turn are in order. Other streams
    are divided by batches, and all ranks must read them alike. `draw` returns the numbers of the rows of a custom
    sampler, the same on all ranks; None if its rows have other keys.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return _share_of_stream(loader, rank, world_size, "uneven")
    rows: Sequence[Any] = range(len(loader.dataset))  # type: ignore[arg-type]
    if isinstance(loader.sampler, DistributedSampler) or _is_plain(loader):
        if loader.drop_last and not isinstance(loader.sampler, DistributedSampler):
            rows = rows[: len(loader) * loader.batch_size]
    else:
        drawn = draw(loader.sampler)
        if drawn is None:
            return EveryNth(loader, rank, world_size, "uneven")
        rows = drawn
    batches = -(-len(rows) // (world_size * loader.batch_size))
    batches_of_rank = [batch for batch in _parts(_parts(rows, world_size)[rank], batches) if batch]
    return _copy_of(loader, rank, batch_sampler=batches_of_rank)


def rank_0s_rows(sampler: Iterable[Any], collectives: Collectives, device: torch.device) -> Sequence[Any] | None:
    """Let every rank draw a sampler's rows; return the numbers that rank 0 drew. None if the rows have other keys."""
    rows = list(sampler)
    if not all(type(row) is int for row in rows):
        return None
    size = int(collectives.broadcast(torch.tensor(len(rows), device=device)))
    padded = torch.tensor((rows + [0] * size)[:size], device=device)
    return collectives.broadcast(padded).tolist()


def _share_of_stream(loader: Iterable[Any], rank: int, world_size: int, last: Last) -> Iterable[Any]:
    stream = getattr(loader, "dataset", None)
    if isinstance(stream, ShardedStream) and stream.world_size > 1:
        _check_rank("ShardedStream", stream.rank, stream.world_size, (rank, world_size))
        return loader
    if type(loader) is DataLoader and type(stream) is ShardedStream:
        of_rank = ShardedStream(stream.dataset, rank=rank, world_size=world_size, last=last)
        return _copy_of(loader, 0, dataset=of_rank)  # rank 0's random numbers: all ranks must read it alike
    return EveryNth(loader, rank, world_size, last)


def _check_rank(kind: str, rank: int, world_size: int, job: tuple[int, int]) -> None:
    if (rank, world_size) != job:
        raise ConfigurationError(
            f"the {kind} divides the data for rank {rank} of {world_size}, and this is rank {job[0]} of {job[1]}",
            remedy="make it inside `with accel.distributed() as job:`, with job.rank and job.world_size",
        )


def _copy_of(loader: DataLoader[Any], rank: int, **of_rank: Any) -> DataLoader[Any]:
    """Return a copy of a loader with another dataset or sampler, whose workers are seeded for this rank."""
    options = {name: getattr(loader, name) for name in _COPIED}
    if "batch_sampler" not in of_rank:
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    start = partial(_start_worker, rank, loader.worker_init_fn) if rank else loader.worker_init_fn
    return DataLoader(**{"dataset": loader.dataset, "worker_init_fn": start, **options, **of_rank})


def _start_worker(rank: int, then: Callable[[int], None] | None, number: int) -> None:
    """Seed a loader's worker by its number among the workers of all ranks, and call `then`, the user's function.

    torch's own seeds would draw the same augmentations on ranks that are seeded alike.
    """
    import numpy as np  # only workers need it

    worker = get_worker_info()
    assert worker is not None, "only a loader's workers call this"
    seed = worker.seed + rank * worker.num_workers
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed([seed >> shift & 0xFFFFFFFF for shift in (0, 32)])  # as torch seeds it
    if then is not None:
        then(number)


def _parts(rows: Sequence[Any], count: int) -> list[list[Any]]:
    return [list(rows[len(rows) * n // count : len(rows) * (n + 1) // count]) for n in range(count)]


_DIVIDE = (
    "make it with sampler=DistributedSampler(data, num_replicas=job.world_size, rank=job.rank); if it already yields "
    "this rank's share, write trainer.batches(loader, shard=False)"
)
_DRAW_ON_EACH_RANK = (
    "let each rank draw its share: WeightedRandomSampler(weights, num_samples // job.world_size, "
    "generator=torch.Generator().manual_seed(job.rank)), and write trainer.batches(loader, shard=False)"
)


def _what_is_own(loader: DataLoader[Any]) -> str:
    """Return why no DistributedSampler can replace the sampler of a loader that is not plain."""
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is a class derived from DataLoader, which may choose rows itself"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "it has batch_size=None: its dataset makes the batches"
    name = "batch_sampler" if loader.batch_size is None else "sampler"
    return f"its {name} is {kind_of(getattr(loader, name))}, which chooses the rows itself"


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a DistributedSampler can replace the sampler: it takes each row once, in order or shuffled."""
    sampler = loader.sampler
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return whole and sampler.generator in (None, loader.generator)
    return type(sampler) is SequentialSampler


class EveryNth:
    """A rank's share of a `stream` of batches that all ranks read alike."""

    def __init__(self, stream: Iterable[Any], rank: int, world_size: int, last: Last) -> None:
        self.stream, self._rank, self._world_size, self._last = stream, rank, world_size, last

    def __iter__(self) -> Iterator[Any]:
        return rounds(iter(self.stream), self._rank, self._world_size, self._last)

    def __len__(self) -> int:
        batches = len(self.stream)  # type: ignore[arg-type]  # raises TypeError if the stream has no length
        more = {"repeat": self._world_size - 1, "drop": 0, "uneven": self._world_size - 1 - self._rank}[self._last]
        return (batches + more) // self._world_size


class Source:
    """A loader, and this rank's share of its batches."""

    def __init__(self, loader: Any, batches: Any) -> None:
        self.loader, self.batches = loader, batches

    def begin(self, epoch: int) -> Iterator[Any]:
        """Return the batches of an epoch; what shuffles by the number of the epoch gets it first."""
        loader = self.batches.stream if isinstance(self.batches, EveryNth) else self.batches
        for part in (loader, getattr(loader, "dataset", None), *_samplers(loader)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return iter(self.batches)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that the loader draws its order from, besides the global one; each once."""
        found = (getattr(part, "generator", None) for part in (self.loader, *_samplers(self.loader)))
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def is_stateful(self) -> bool:
        """Return whether the loader knows its own position."""
        return all(callable(getattr(self.loader, name, None)) for name in ("state_dict", "load_state_dict"))

    def form(self) -> dict[str, Any]:
        """Return what decides which rows the batches of an epoch hold, as far as the loader tells."""
        sampler = getattr(self.batches, "sampler", None)
        form: dict[str, Any] = {} if sampler is None else {"sampler": type(sampler).__name__}
        rows: Any = getattr(sampler, "dataset", sampler)  # a DistributedSampler's length is that of one rank's share
        for what, of in (("number of batches", self.batches), ("number of rows", rows)):
            with suppress(TypeError, NotImplementedError):  # it has no length
                form[what] = len(of)
        return form


class Shares:
    """This rank's share of the loader that a training reads, kept from epoch to epoch with its workers."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives, self._device = collectives, device
        self.forget()

    def forget(self) -> None:
        self._kept: Source | None = None

    def of(self, loader: Iterable[Any], *, shard: bool) -> Source:
        """Return `loader` with this rank's share of it; `shard` is False if the loader yields the share already."""
        if not shard or self._collectives.world_size == 1:
            return Source(loader, loader)
        if self._kept is None or self._kept.loader is not loader:
            self._kept = Source(loader, share(loader, self._collectives.rank, self._collectives.world_size))
        return self._kept

    def shuffle_alike(self, source: Source, seed: int | None) -> int | None:
        """Give the sampler that `share` made, if it made one, the same seed on all ranks; return the seed.

        The first seed is rank 0's: all ranks shuffle alike even if each was seeded differently.
        """
        sampler = getattr(source.batches, "sampler", None)
        if not isinstance(sampler, DistributedSampler) or sampler is getattr(source.loader, "sampler", None):
            return seed
        if seed is None:
            rows, batches = len(sampler.dataset), len(source.batches)  # type: ignore[arg-type]  # it has a length
            given = torch.tensor([torch.initial_seed() % 2**31, rows, batches], device=self._device)
            seed, *expected = self._collectives.broadcast(given).tolist()
            if [rows, batches] != expected:
                raise DistributedError(
                    f"the loader of rank {self._collectives.rank} has {rows} rows, {batches} batches for each rank, "
                    f"and that of rank 0 has {expected[0]} rows, {expected[1]} batches",
                    why="trainer.batches(loader) divides one dataset among the ranks, which train on as many batches",
                    remedy="give all ranks the whole dataset, and the same batch_size and drop_last; for loaders that "
                    "have the ranks' shares, write trainer.batches(loader, shard=False)",
                )
        sampler.seed = seed
        return seed


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
