"""Feeding a training loop: this rank's share of the data, on the device, from a known position.

The order of a torch DataLoader depends on the random state at the moment an epoch starts. So a position is that state
and the number of batches taken since; coming back to it starts the epoch again from the state and takes as many
batches, which also brings the random numbers inside loader workers to where they were. A loader that knows its own
position, as torchdata's StatefulDataLoader does, is asked for it instead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError
from accelcore.roles.collectives import Collectives
from accelcore.roles.runtime import Runtime
from accelcore.training.data_shares import EveryNth, share
from accelcore.training.stream_checks import StreamChecks

__all__ = ["Batches", "Feed"]

logger = logging.getLogger("accelcore")


class Batches(Iterator[Any]):
    """Batches of one epoch, to be iterated over once.

    Its length is how many a whole epoch has; after a resume within one, fewer are left of it. What is read from an
    iterable without a length has none.
    """

    def __init__(self, batches: Iterator[Any], length: Callable[[], int]) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:  # noqa: PYI034
        return self._batches  # these, so that a loop has nothing between it and a batch

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return self._length()


class Feed:
    """One stream of batches, epoch after epoch.

    Attributes:
        epoch: the epoch that is under way, or comes next; counted from 0.
        taken: batches this rank has been given in it.
        turn: the number of the loop over it that is under way; an older loop has lost its place.
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
        self._stateful: Any = None  # the loader that is being read, where it knows its own position
        self._saved: Any = None  # the position that such a one had when a checkpoint was saved
        self._streams = StreamChecks(collectives, runtime.device)
        self.turn = 0

    def batches(self, loader: Iterable[Any], *, shard: bool) -> Iterator[Any]:
        """One epoch of `loader`, or what is left of it after a resume."""
        source = self._source_of(loader, shard)
        sampler = getattr(source, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler is not getattr(loader, "sampler", None):
            sampler.seed = self._common_seed()  # it is of our making
        generators = _generators(loader)
        if self._resuming:
            iterator = self._go_back(loader, source, generators)
        else:
            if self.taken:  # the loop was left before the epoch's end
                self.epoch, self.taken = self.epoch + 1, 0
            self._start = self._runtime.rng_state()
            self._generators_start = [generator.get_state() for generator in generators]
            iterator = self._begin(source)
        self.turn += 1
        turn = self.turn
        self._stateful = loader if _is_stateful(loader) else None
        # Workers read ahead as it is. Without them, reading ahead would draw the next batch's random numbers too early,
        # and a loader would tell a position that is ahead of the training's.
        reads_ahead = isinstance(source, DataLoader) and source.num_workers > 0 and source.pin_memory
        ahead = reads_ahead and self._stateful is None
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
                self._stateful = None
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
            "loader": self._saved if self._stateful is None or not self.taken else self._stateful.state_dict(),
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
        self._stateful, self._saved = None, state.get("loader")

    def move_to(self, epoch: int) -> None:
        """Be at the beginning of an epoch."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigurationError(f"epoch={epoch!r} is no epoch", remedy="give a whole number, 0 or more")
        self.turn += 1
        self.epoch, self.taken, self._resuming = epoch, 0, False
        self._stateful = self._saved = None

    def _begin(self, source: Any) -> Iterator[Any]:
        loader = source.stream if isinstance(source, EveryNth) else source
        for part in (loader, getattr(loader, "dataset", None), *_samplers(loader)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        divided = isinstance(source, EveryNth)
        batches = self._streams.watch(loader, iter(loader), alike=divided)
        return source.of_rank(batches) if divided else batches

    def _go_back(self, loader: Any, source: Any, generators: list[torch.Generator]) -> Iterator[Any]:
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
        saved, self._saved = self._saved, None
        if saved is not None:
            _restore(loader, saved)
            iterator = self._begin(source)
            self._runtime.set_rng_state(now)  # it may have drawn a number, as at the beginning of an epoch
            return iterator
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

    def length(self, loader: Iterable[Any], *, shard: bool) -> int:
        """How many batches an epoch of `loader` has for this rank. Asks no other."""
        return len(self._source_of(loader, shard))  # type: ignore[arg-type]

    def _source_of(self, loader: Iterable[Any], shard: bool) -> Iterable[Any]:
        if not shard or self._collectives.world_size == 1:
            return loader
        if self._source[0] is not loader:
            self._source = (loader, share(loader, self._collectives.rank, self._collectives.world_size))
        source: Iterable[Any] = self._source[1]
        return source

    def _common_seed(self) -> int:
        """Rank 0's seed, so that all ranks shuffle alike even where each has seeded itself differently."""
        if self._seed is None:
            seed = torch.tensor(torch.initial_seed() % 2**31, device=self._runtime.device)
            self._seed = int(self._collectives.broadcast(seed).item())
        return self._seed


def _is_stateful(loader: Any) -> bool:
    """Whether a loader tells its own position, and can be brought to one: it has torchdata's protocol."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _restore(loader: Any, state: Any) -> None:
    if not _is_stateful(loader):
        raise CheckpointError(
            f"the checkpoint was saved in mid-epoch with a loader that knows its position, and this "
            f"{type(loader).__name__} does not",
            why="the two may not have the same batches in the same order",
            remedy="give the loader it was saved with, or resume from a checkpoint saved at the end of an epoch",
        )
    try:
        loader.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"the {type(loader).__name__} does not take the position it had in the checkpoint",
            why=repr(error),
            remedy="build the loader as it was built when the checkpoint was saved",
        ) from error


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader draws its order from, beside the global one; each once."""
    found = (getattr(part, "generator", None) for part in (loader, *_samplers(loader)))
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
