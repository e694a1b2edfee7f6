"""Feeding a training loop: this rank's share of the data, on the device, from a known position.

The order of a torch DataLoader depends on the random state at the moment an epoch starts. So a position is that state
and the number of batches taken since; coming back to it starts the epoch again from the state and takes as many
batches, which also brings the random numbers inside loader workers to where they were.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError
from accelcore.roles.collectives import Collectives
from accelcore.roles.runtime import Runtime

__all__ = ["Feed", "Feeds"]

logger = logging.getLogger("accelcore")

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


class Feeds:
    """The streams of a training, by name."""

    def __init__(self, runtime: Runtime, collectives: Collectives) -> None:
        self._runtime, self._collectives = runtime, collectives
        self._feeds: dict[str, Feed] = {}
        self._checked = collectives.world_size == 1

    def __getitem__(self, name: str) -> Feed:
        if name not in self._feeds:
            self._feeds[name] = Feed(self._runtime, self._collectives)
        return self._feeds[name]

    def check_shared(self, batch: Any) -> None:
        """Warn, once, where every rank of a job trains on the same batch, which came from no stream of these."""
        if self._checked:
            return
        self._checked = True
        if any(feed.taken for feed in self._feeds.values()):
            return
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        total = sum(float(leaf.detach().double().abs().sum()) for leaf in leaves)
        both = torch.tensor([total, -total], dtype=torch.float32, device=self._runtime.device)
        low, high = self._collectives.all_reduce(both, "min").tolist()
        if leaves and low == -high and self._collectives.rank == 0:
            logger.warning(
                "every rank of this job trains on the same batch: read the loader through trainer.batches(loader), "
                "which gives each rank its share"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position of each, as `load_state_dict` takes it."""
        return {name: feed.state_dict() for name, feed in self._feeds.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be at saved positions; a stream that has none is at its beginning."""
        for name in {*self._feeds, *state}:
            self[name].load_state_dict(state.get(name))


class Feed:
    """One stream of batches, epoch after epoch.

    Attributes:
        epoch: the epoch that is under way, or comes next; counted from 0.
        taken: batches this rank has been given in it.
        turn: which loop over it is under way, of all so far: an older one is not at its place any more.
    """

    def __init__(self, runtime: Runtime, collectives: Collectives) -> None:
        self._runtime = runtime
        self._collectives = collectives
        self.epoch = 0
        self.taken = 0
        self._seed: int | None = None
        self._start: dict[str, Tensor] = {}
        self._generators_start: list[Tensor] = []
        self._source: tuple[Any, Any] = (None, None)
        self._resuming = False
        self.turn = 0

    def batches(self, loader: Iterable[Any], *, shard: bool) -> Iterator[Any]:
        """One epoch of `loader`, or what is left of it after a resume."""
        source = self._share(loader) if shard and self._collectives.world_size > 1 else loader
        generators = _generators(loader)
        if self._resuming:
            iterator = self._go_back(source, generators)
        else:
            if self.taken:  # the loop was left before the epoch's end
                self.epoch, self.taken = self.epoch + 1, 0
            self._start = self._runtime.rng_state()
            self._generators_start = [generator.get_state() for generator in generators]
            iterator = self._begin(source)
        self.turn += 1
        turn = self.turn
        # Workers read ahead as it is. Without them, reading ahead would draw the next batch's random numbers too early.
        ahead = isinstance(source, DataLoader) and source.num_workers > 0 and source.pin_memory
        try:
            for batch in self._one_ahead(iterator) if ahead else map(self._runtime.to_device, iterator):
                self.taken += 1
                yield batch
                if turn != self.turn:
                    raise TrainingError(
                        "this loop over batches is not at its place any more",
                        why="a checkpoint was resumed inside it, or another loop over the same stream has begun",
                        remedy="leave it after trainer.resume(...), and begin it anew",
                    )
        finally:
            if turn == self.turn:  # also where it was left early: what comes next is an epoch of its own
                self.epoch, self.taken = self.epoch + 1, 0
                self._generators_start = [generator.get_state() for generator in generators]

    def _one_ahead(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Batches on the device, each transfer begun before the batch in front of it is used."""
        waiting: deque[Callable[[], Any]] = deque()
        for batch in iterator:
            waiting.append(self._runtime.prefetch(batch))
            if len(waiting) > 1:
                yield waiting.popleft()()
        for ready in waiting:
            yield ready()

    def state_dict(self) -> dict[str, Any]:
        """The position, as `load_state_dict` takes it."""
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "seed": self._seed,
            "start": self._start if self.taken else {},
            "generators": self._generators_start,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Be at a saved position, or at the beginning; the next call of `batches` goes on from there."""
        self.turn += 1
        self._source = (None, None)
        self._resuming = state is not None
        if state is None:
            state = {"epoch": 0, "taken": 0, "seed": None, "start": {}, "generators": []}
        self.epoch, self.taken, self._seed = state["epoch"], state["taken"], state["seed"]
        self._start, self._generators_start = state["start"], state["generators"]

    def _begin(self, source: Any) -> Iterator[Any]:
        for part in (source, getattr(source, "dataset", None), *_samplers(source)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        return iter(source)

    def _go_back(self, source: Any, generators: list[torch.Generator]) -> Iterator[Any]:
        if len(generators) != len(self._generators_start):
            raise CheckpointError(
                f"the loader has {len(generators)} generators of its own, and the checkpoint's had "
                f"{len(self._generators_start)}",
                why="the order of the data would not be the one the checkpoint belongs to",
                remedy="build the loader as it was built when the checkpoint was saved",
            )
        self._resuming = False
        now = self._runtime.rng_state()
        if getattr(source, "persistent_workers", False) and self.epoch:
            logger.warning("random numbers drawn inside persistent loader workers start anew after a resume")
            iter(source)  # starts the workers, which draws a number that later epochs do not draw
            self._runtime.set_rng_state(now)
        for generator, state in zip(generators, self._generators_start, strict=True):
            generator.set_state(state)
        if not self.taken:
            self._start = now
            return self._begin(source)
        self._runtime.set_rng_state(self._start)
        iterator = self._begin(source)
        for done in range(self.taken):
            if next(iterator, self) is self:
                raise CheckpointError(
                    f"the checkpoint was saved after {self.taken} batches of an epoch, and the loader has only {done}",
                    remedy="give the loader the dataset and batch size it had when the checkpoint was saved",
                )
        self._runtime.set_rng_state(now)
        return iterator

    def _share(self, loader: Iterable[Any]) -> Iterable[Any]:
        if self._source[0] is not loader:
            self._source = (loader, self._shared(loader))
        shared: Iterable[Any] = self._source[1]
        return shared

    def _shared(self, loader: Iterable[Any]) -> Iterable[Any]:
        rank, world_size = self._collectives.rank, self._collectives.world_size
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return _EveryNth(loader, rank, world_size)
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
            seed=self._common_seed(),
            drop_last=loader.drop_last,
        )
        return DataLoader(loader.dataset, sampler=sampler, **{name: getattr(loader, name) for name in _COPIED})

    def _common_seed(self) -> int:
        """Rank 0's seed, so that all ranks shuffle alike even where each has seeded itself differently."""
        if self._seed is None:
            seed = torch.tensor(torch.initial_seed() % 2**31, device=self._runtime.device)
            self._seed = int(self._collectives.broadcast(seed).item())
        return self._seed


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader draws its order from, beside the global one; each once."""
    found = (getattr(part, "generator", None) for part in (loader, *_samplers(loader)))
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader takes all of its dataset, shuffled or not, so that a DistributedSampler can share it out."""
    sampler = loader.sampler
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(sampler) is RandomSampler:
        whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return whole and sampler.generator in (None, loader.generator)
    return type(sampler) is SequentialSampler


class _EveryNth:
    """A rank's share of a stream that every rank reads alike: its batch of each full round of `world_size`.

    Batches of a last round that is not full are given to nobody, so that all ranks take the same number of steps.
    """

    def __init__(self, stream: Iterable[Any], rank: int, world_size: int) -> None:
        self._stream, self._rank, self._world_size = stream, rank, world_size
        self.dataset = getattr(stream, "dataset", None)

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for number, batch in enumerate(self._stream):
            if number % self._world_size == self._rank:
                mine = batch
            if number % self._world_size == self._world_size - 1:
                yield mine
