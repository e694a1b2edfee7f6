"""Batches for a training loop: this rank's share of the data, on the device, from a known position.

A position is the random state when the epoch started, and the number of batches taken since then. To restore it, the
epoch starts again from that state and skips as many batches. That also restores the random numbers inside loader
workers. A loader with `state_dict` and `load_state_dict` restores its own position instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from accelcore.errors import CheckpointError, ConfigurationError, DistributedError, Once, TrainingError, logger, notice
from accelcore.jobs.collectives import Collectives
from accelcore.roles.runtime import Runtime
from accelcore.training.data.sharding import EveryNth, share
from accelcore.util.containers import checksum
from accelcore.util.text import is_whole, kind_of

_BEGINNING: dict[str, Any] = {
    "epoch": 0, "taken": 0, "seed": None, "start": {}, "generators": [], "form": {}, "loader": None,
}  # fmt: skip

_FIRST = "first batch"  # its checksum, in the form

_all: WeakSet[DataStream] = WeakSet()
"""The data of all trainers: a GAN's generator trains on batches that the critic's trainer reads."""


class DataStream:
    """The batches that a trainer reads, epoch after epoch.

    Attributes:
        epoch: the current one, or the next one between two epochs; counted from 0.
        taken: batches that this rank has received in this epoch.
        loop: number of the current loop over the batches: an older loop has lost its position.
    """

    def __init__(self, runtime: Runtime, collectives: Collectives, log: Once) -> None:
        self._runtime, self._collectives, self._log = runtime, collectives, log
        self._keeps_epoch = False  # whether the script has set the epoch
        self.total_epochs: int | None = None
        self._batches: int | None = None  # of an epoch
        self._generators: list[torch.Generator] = []  # of the loader
        self.loop = 0
        self._loops_over_epochs = 0
        self.load_state_dict(_BEGINNING)
        _all.add(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position, at which the next call of `batches` continues."""
        self.loop += 1
        self.epoch: int = state["epoch"]
        self.taken: int = state["taken"]
        self._resuming = bool(self.epoch or self.taken)
        self._restored = True  # in the present epoch of `epochs`
        self._seed: int | None = state["seed"]
        self._start: dict[str, Tensor] = state["start"]
        self._generators_start: list[Tensor] = state["generators"]
        self._form: dict[str, Any] = state["form"]  # what must be the same if the epoch is continued
        self._saved: Any = state["loader"]  # the position of a loader that knows its own
        self._stateful: Any = None  # such a loader, in the current loop
        self._source: tuple[Any, Any] = None, None  # a loader, and this rank's share of it
        # The steps of all trainers when the loop got its last batch; None: it got none.
        self._given: dict[int, tuple[int, int]] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "seed": self._seed,
            "start": self._start if self.taken else {},
            "generators": self._generators_start,
            "form": self._form if self.taken else {},
            "loader": self._saved if self._stateful is None or not self.taken else self._stateful.state_dict(),
        }

    def batches(self, loader: Iterable[Any], *, shard: bool) -> Iterator[Any]:
        """Yield one epoch of `loader`, or the rest of it after a resume."""
        source = self._source_of(loader, shard)
        sampler = getattr(source, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler is not getattr(loader, "sampler", None):
            # `share` made this sampler, of a dataset with a length.
            sampler.seed = self._common_seed(len(sampler.dataset), len(source))  # type: ignore[arg-type]
        self._generators = generators = _generators(loader)
        if self._resuming:
            iterator = self._restore_position(loader, source, generators)
        else:
            if self.taken:  # the previous loop was left early
                self.epoch, self.taken = self.epoch + 1, 0
            self._start = self._runtime.rng_state()
            self._generators_start = [generator.get_state() for generator in generators]
            iterator = self._begin(source)
        self._form = {**_form_of(source), _FIRST: self._form.get(_FIRST)}
        self._given = None
        self.loop += 1
        loop = self.loop
        self._stateful = loader if _is_stateful(loader) else None
        # Only workers may read ahead. Without them the next batch would draw its random numbers too early, and a
        # stateful loader would report a position that is ahead of the training.
        reads_ahead = isinstance(source, DataLoader) and source.num_workers > 0 and source.pin_memory
        ahead = reads_ahead and self._stateful is None
        try:
            if not self.taken:
                begun = list(islice(iterator, 1))
                self._form[_FIRST] = checksum(begun)
                iterator = _joined(begun, iterator)
            for batch in self._one_ahead(iterator) if ahead else map(self._runtime.to_device, iterator):
                self.taken += 1
                self._given = dict(self._collectives.steps)
                yield batch
                if loop != self.loop:
                    raise TrainingError(
                        "this loop over batches has lost its position",
                        why="inside it a checkpoint was resumed, the epoch was set or has ended, or another loop began",
                        remedy="start a new loop after trainer.resume(...); evaluate by trainer.evaluate(loader); read "
                        "two loaders as one: zip(one, other)",
                    )
            if not self.taken:
                raise _no_batches(loader)
        finally:
            if loop == self.loop:  # also if the loop is left early: that ends the epoch
                self._end_epoch()

    def _end_epoch(self) -> None:
        self.loop += 1
        self.epoch, self.taken, self._stateful = self.epoch + 1, 0, None
        self._generators_start = [generator.get_state() for generator in self._generators]

    def epochs(self, total: int) -> Iterator[int]:
        """Return the epochs that are left of `total`; see `Trainer.epochs`."""
        if not is_whole(total):
            given, remedy = repr(total), "give a whole number >= 0"
            if isinstance(total, Iterable) and not isinstance(total, str):
                given, remedy = kind_of(total), f"{remedy}, and the data to trainer.batches(loader)"
            raise ConfigurationError(f"{given} is not a number of epochs", remedy=remedy)
        self.total_epochs = total
        if 0 < total <= self.epoch and self._log.is_written:
            notice(
                "this training is finished (epochs done: %d, asked for: %d); to continue, ask for more; to start over, "
                "delete the checkpoints, or save to another folder",
                self.epoch,
                total,
            )
        return self._epochs(total)

    def _epochs(self, total: int) -> Iterator[int]:
        self._loops_over_epochs += 1
        number = self._loops_over_epochs
        # An epoch ends when the loop asks for the next one, even if its batches were not read here.
        while self.epoch < total:
            epoch, loop, self._restored = self.epoch, self.loop, False
            yield epoch
            if number != self._loops_over_epochs:
                raise TrainingError(
                    f"another loop over trainer.epochs(...) has run inside the loop over trainer.epochs({total})",
                    why=f"a trainer counts its epochs once: the outer loop was at epoch {epoch}, and the trainer is "
                    f"now at epoch {self.epoch}",
                    remedy="write one loop over trainer.epochs(n), and give it all epochs",
                )
            if self.epoch == epoch and self.loop == loop:
                self.epoch += 1
            elif self.epoch == epoch and self.taken and not self._restored:  # its batches are read by `next`
                self._end_epoch()
            if self._restored and self.epoch <= epoch:
                raise TrainingError(
                    f"the loop over trainer.epochs({total}) would come to epoch {self.epoch} again",
                    why="trainer.resume() was called in it, and went back to an earlier checkpoint: it may never end",
                    remedy="call it once, before the loop; to go back while training, leave the loop by break, resume, "
                    "and begin another",
                )

    @property
    def place(self) -> tuple[int, int]:
        """Place in the data, another one for each batch that a loop was given."""
        return self.loop, self.taken

    @property
    def gave_batches(self) -> bool:
        """Whether the last loop got a batch. The rest of an epoch after a resume may be empty."""
        return self._given is not None

    def measure(self, loader: Iterable[Any], *, shard: bool) -> None:
        """Note how many batches an epoch of `loader` has, for `total_steps`."""
        try:
            self._batches = self.length(loader, shard=shard)
        except (TypeError, NotImplementedError):  # it has no length
            self._batches = None

    def total_steps(self, accumulate: int) -> int | None:
        """Return the number of windows of all epochs; None if it is unknown."""
        if self.total_epochs is None or self._batches is None:
            return None
        return self.total_epochs * -(-self._batches // accumulate)

    def warn_if_unused(self) -> None:
        """Warn once if no trainer has read batches here, or had its epoch set: in a job's first step, and at a `save`.

        In a job a script may divide its data itself. It looks the same as a script that forgot to.
        """
        if self._keeps_epoch or any(stream.epoch or stream.taken for stream in _all):
            return
        in_job = self._collectives.world_size > 1
        same = ", and all ranks train on the same data unless the script divides it" if in_job else ""
        self._log.warn(
            "no batch of this training came through trainer.batches(loader): checkpoints have no position in the "
            "data%s. Write `for batch in trainer.batches(loader):`. If the script finds its place in the data "
            "itself, let it set trainer.epoch = epoch before each epoch: this warning then ends",
            same,
        )

    def warn_if_untrained(self) -> None:
        """Log once if no trainer has made a step since the loop got its last batch."""
        if self.taken and self._given == self._collectives.steps:
            self._log.warn(
                "trainer.save() was called before a step on the batch that the loop got last: a run that resumes "
                "from this checkpoint skips the batch. Call save after trainer(batch)"
            )

    def _one_ahead(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield batches on the device; the transfer of each starts before the previous batch is used."""
        waiting: deque[Callable[[], Any]] = deque()
        for batch in iterator:
            waiting.append(self._runtime.prefetch(batch))
            if len(waiting) > 1:
                yield waiting.popleft()()
        for ready in waiting:
            yield ready()

    def move_to(self, epoch: int) -> None:
        if not is_whole(epoch):
            raise ConfigurationError(f"epoch={epoch!r} is not an epoch", remedy="give a whole number >= 0")
        self._keeps_epoch = True
        if self.taken or epoch != self.epoch:  # else a loop over `epochs` would never end
            self.load_state_dict({**_BEGINNING, "epoch": epoch, "seed": self._seed})
            self._resuming = self._restored = False

    def length(self, loader: Iterable[Any], *, shard: bool) -> int:
        return len(self._source_of(loader, shard))  # type: ignore[arg-type]

    def _begin(self, source: Any) -> Iterator[Any]:
        loader = source.stream if isinstance(source, EveryNth) else source
        for part in (loader, getattr(loader, "dataset", None), *_samplers(loader)):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        return iter(source)

    def _restore_position(self, loader: Any, source: Any, generators: list[torch.Generator]) -> Iterator[Any]:
        if len(generators) != len(self._generators_start):
            raise CheckpointError(
                f"the loader has {len(generators)} random generators, and the checkpoint has "
                f"{len(self._generators_start)}",
                remedy="build the loader as it was built when the checkpoint was saved",
            )
        self._resuming = False
        now = self._runtime.rng_state()
        draws_anew = getattr(source, "persistent_workers", False) and self.epoch > 0
        if draws_anew:
            logger.warning("persistent loader workers start with new random numbers after a resume")
            iter(source)  # starts the workers, which draws a number that later epochs do not draw
            self._runtime.set_rng_state(now)
        for generator, state in zip(generators, self._generators_start, strict=True):
            generator.set_state(state)
        if not self.taken:
            self._start = now
            return self._begin(source)
        saved, self._saved = self._saved, None
        if saved is None:
            _check_form(self._form, _form_of(source))
            self._runtime.set_rng_state(self._start)
        elif _is_stateful(loader):
            loader.load_state_dict(saved)
        else:
            raise CheckpointError(
                "the checkpoint has the position of a stateful loader, and this "
                f"{type(loader).__name__} has no state_dict",
                remedy="give the loader it was saved with, or a checkpoint from the end of an epoch",
            )
        iterator = self._begin(source)
        for done in range(self.taken if saved is None else 0):
            batch = next(iterator, self)
            if batch is self:
                raise CheckpointError(
                    f"the checkpoint was saved after {self.taken} batches of an epoch, and the loader has only {done}",
                    remedy="give the loader the dataset and batch size it had when the checkpoint was saved",
                )
            if not done and not draws_anew and self._form.get(_FIRST) not in (None, checksum(batch)):
                self._log.warn(
                    "epoch %d began with another batch in the run that saved this checkpoint: its rest may repeat "
                    "rows, and omit others. If the data count epochs or draw an order themselves, give them "
                    "set_epoch(epoch), or give the loader state_dict() and load_state_dict(state); or save at the ends "
                    "of epochs",
                    self.epoch,
                )
        self._runtime.set_rng_state(now)  # `iter` and the earlier batches have drawn numbers
        return iterator

    def _source_of(self, loader: Iterable[Any], shard: bool) -> Iterable[Any]:
        if not shard or self._collectives.world_size == 1:
            return loader
        if self._source[0] is not loader:
            self._source = (loader, share(loader, self._collectives.rank, self._collectives.world_size))
        source: Iterable[Any] = self._source[1]
        return source

    def _common_seed(self, rows: int, batches: int) -> int:
        if self._seed is None:  # rank 0's: all ranks shuffle alike even if each was seeded differently
            own = torch.tensor([torch.initial_seed() % 2**31, rows, batches], device=self._runtime.device)
            seed, *expected = self._collectives.broadcast(own).tolist()
            if [rows, batches] != expected:
                raise DistributedError(
                    f"the loader of rank {self._collectives.rank} has {rows} rows, {batches} batches for each rank, "
                    f"and that of rank 0 has {expected[0]} rows, {expected[1]} batches",
                    why="trainer.batches(loader) divides one dataset among the ranks, which train on as many batches",
                    remedy="give all ranks the whole dataset, and the same batch_size and drop_last; for loaders that "
                    "have the ranks' shares, write trainer.batches(loader, shard=False)",
                )
            self._seed = seed
        return self._seed


def _joined(begun: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    while begun:
        yield begun.pop()  # which does not keep the batch alive
    yield from rest


def _form_of(source: Any) -> dict[str, Any]:
    """Return what decides which rows the batches of an epoch hold, as far as a loader tells."""
    sampler = getattr(source, "sampler", None)
    form: dict[str, Any] = {} if sampler is None else {"sampler": type(sampler).__name__}
    rows: Any = getattr(sampler, "dataset", sampler)  # a DistributedSampler's length is that of one rank's share
    for what, of in (("number of batches", source), ("number of rows", rows)):
        with suppress(TypeError, NotImplementedError):  # it has no length
            form[what] = len(of)
    return form


def _check_form(saved: dict[str, Any], now: dict[str, Any]) -> None:
    for what, value in now.items():
        if saved.get(what, value) != value:
            raise CheckpointError(
                f"the checkpoint was saved within an epoch, whose {what} was {saved[what]}, and the loader's is "
                f"{value}",
                why="the rest of the epoch would repeat rows, and omit others",
                remedy="give the loader the dataset, batch size and shuffle= that it had, or resume from the end of an "
                "epoch",
            )


def _no_batches(loader: Any) -> TrainingError:
    why, remedy = "its data is empty", "give a loader with at least one batch"
    if isinstance(loader, Iterator):
        why = "an iterator or a generator gives its batches once, in one epoch"
        remedy = "pass a list or a DataLoader"
    elif getattr(loader, "drop_last", False):
        why = "its data is less than a batch, and drop_last=True drops it"
    return TrainingError("the loader has no batches: this epoch would train nothing", why=why, remedy=remedy)


def _is_stateful(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _samplers(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader draws its order from, besides the global one; each once."""
    found = (getattr(part, "generator", None) for part in (loader, *_samplers(loader)))
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
