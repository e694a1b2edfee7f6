"""Batches for a training loop: this rank's share of the data, on the device, from a known position.

A position is the random state when the epoch started, and the number of batches taken since then. To restore it, the
epoch starts again from that state and skips as many batches. That also restores the random numbers inside loader
workers. A loader with `state_dict` and `load_state_dict` restores its own position instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.data import DataLoader

from accelcore.errors import CheckpointError, ConfigurationError, Once, TrainingError, logger, notice
from accelcore.jobs.collectives import Collectives
from accelcore.roles.runtime import Runtime
from accelcore.training.data.sharding import Shares, Source
from accelcore.util.containers import checksum
from accelcore.util.text import is_whole, kind_of, text_remedy

_OTHER_LOOPS = "evaluate by trainer.evaluate(loader); read two loaders as one, by zip(one, other) or chain(one, other)"
_FIRST = "first batch"  # its checksum, in the form


@dataclass
class Position:
    """Position in the data, as a checkpoint has it."""

    epoch: int = 0  # the current one, or the next one between two epochs; counted from 0
    taken: int = 0  # batches that this rank has received in this epoch
    seed: int | None = None  # by which all ranks shuffle alike
    start: dict[str, Tensor] = field(default_factory=dict)  # the random state when the epoch started
    generators: list[Tensor] = field(default_factory=list)  # the states of the loader's own generators then
    form: dict[str, Any] = field(default_factory=dict)  # what must be the same if the epoch is continued
    loader: Any = None  # the position of a loader that knows its own

    def move_to(self, epoch: int) -> None:
        """Move to the beginning of an epoch, which starts from the random state at that time."""
        self.epoch, self.taken, self.start, self.generators, self.form, self.loader = epoch, 0, {}, [], {}, None


class DataStream:
    """The batches that a trainer reads, epoch after epoch.

    Attributes:
        position: where it is in the data. Each restore replaces it.
        use: what the script does with the batches.
        loops: the loops over its epochs.
    """

    def __init__(self, runtime: Runtime, collectives: Collectives, log: Once) -> None:
        self._runtime, self._log = runtime, log
        self._shares = Shares(collectives, runtime.device)
        self.position, self.use, self.loops = Position(), DataUse(collectives, log), EpochLoops()
        self._resumes = False  # whether the next loop continues from a restored position
        self._source: Source | None = None  # of the current loop
        self._loop = 0  # number of the current loop over the batches: an older loop has lost its position
        _streams.add(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position, at which the next call of `batches` continues."""
        self.position = Position(**{name: state[name] for name in vars(Position())})
        self._resumes = self.has_moved
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        state = {**vars(self.position)}
        if not self.position.taken:
            state |= {"start": {}, "form": {}}
        elif not self._resumes and self._source is not None and self._source.is_stateful():
            state["loader"] = self._source.loader.state_dict()
        return state

    @property
    def has_moved(self) -> bool:
        """Whether this is not the beginning of the first epoch."""
        return self.position.epoch > 0 or self.position.taken > 0

    @property
    def place(self) -> tuple[int, int]:
        """Place in the data, another one for each batch that a loop was given."""
        return self._loop, self.position.taken

    def move_to(self, epoch: int) -> None:
        if not is_whole(epoch):
            raise ConfigurationError(f"epoch={epoch!r} is not an epoch", remedy="give a whole number >= 0")
        self.use.keeps_epoch = True
        if self.position.taken or epoch != self.position.epoch:  # else a loop over `epochs` would never end
            self.position.move_to(epoch)
            self._resumes = False
            self._forget()
        elif epoch != self.loops.epoch:
            self.loops.epoch = None  # the script has left that loop, and keeps its iterator

    def _forget(self) -> None:
        self._loop += 1
        self._source, self.use.given, self.loops.epoch = None, None, None
        self._shares.forget()

    def batches(self, loader: Iterable[Any], *, shard: bool) -> Iterator[Any]:
        """Yield one epoch of `loader`, or the rest of it after a resume."""
        source, position = self._shares.of(loader, shard=shard), self.position
        position.seed = self._shares.shuffle_alike(source, position.seed)
        if self._resumes:
            iterator = self._restore(source)
        else:
            if position.taken:  # the previous loop was left early
                position.move_to(position.epoch + 1)
            self.loops.check_epoch(position.epoch)
            position.start = self._runtime.rng_state()
            position.generators = [generator.get_state() for generator in source.generators()]
            iterator = source.begin(position.epoch)
        position.form = {**source.form(), _FIRST: position.form.get(_FIRST)}
        self.use.given, self._source = None, source
        self._loop += 1
        loop = self._loop
        # Only workers may read ahead. Without them the next batch would draw its random numbers too early, and a
        # stateful loader would report a position that is ahead of the training.
        own = source.batches
        reads_ahead = (
            isinstance(own, DataLoader) and own.num_workers > 0 and own.pin_memory and not source.is_stateful()
        )
        try:
            if not position.taken:
                begun = list(islice(iterator, 1))
                position.form[_FIRST] = checksum(begun)
                iterator = _joined(begun, iterator)
            for batch in self._one_ahead(iterator) if reads_ahead else map(self._runtime.to_device, iterator):
                position.taken += 1
                self.use.note_batch()
                yield batch
                if loop != self._loop:
                    raise TrainingError(
                        "this loop over batches has lost its position",
                        why="inside it a checkpoint was resumed, the epoch was set or has ended, or another loop began",
                        remedy=f"start a new loop after trainer.resume(...); {_OTHER_LOOPS}",
                    )
            if not position.taken:
                raise _no_batches(loader)
        finally:
            if loop == self._loop:  # also if the loop is left early: that ends the epoch
                self.end_epoch()

    def end_epoch(self) -> None:
        """End the epoch whose batches were read."""
        source, self._source = self._source, None
        assert source is not None, "a loop has begun"
        self._loop += 1
        self.position.move_to(self.position.epoch + 1)
        self.position.generators = [generator.get_state() for generator in source.generators()]

    def epochs(self, total: int) -> Iterator[int]:
        """Return the epochs that are left of `total`; see `Trainer.epochs`."""
        if not is_whole(total):
            given, remedy = repr(total), text_remedy(total, whole=True) or "give a whole number >= 0"
            if isinstance(total, Iterable) and not isinstance(total, str):
                given, remedy = kind_of(total), f"{remedy}, and the data to trainer.batches(loader)"
            raise ConfigurationError(f"{given} is not a number of epochs", remedy=remedy)
        if 0 < total <= self.position.epoch and self._log.is_written:
            notice(
                "this training is finished (epochs done: %d, asked for: %d); to continue, ask for more; to start over, "
                "delete the checkpoints, or save to another folder",
                self.position.epoch,
                total,
            )
        self.loops.total = total
        return self.loops.over(self, total)

    def measure(self, loader: Iterable[Any], *, shard: bool) -> None:
        """Note how many batches an epoch of `loader` has, for `EpochLoops.total_steps`."""
        try:
            self.loops.batches = self.length(loader, shard=shard)
        except (TypeError, NotImplementedError):  # it has no length
            self.loops.batches = None

    def length(self, loader: Iterable[Any], *, shard: bool) -> int:
        return len(self._shares.of(loader, shard=shard).batches)

    def _one_ahead(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield batches on the device; the transfer of each starts before the previous batch is used."""
        waiting: deque[Callable[[], Any]] = deque()
        for batch in iterator:
            waiting.append(self._runtime.prefetch(batch))
            if len(waiting) > 1:
                yield waiting.popleft()()
        for ready in waiting:
            yield ready()

    def _restore(self, source: Source) -> Iterator[Any]:
        """Return the rest of the epoch from the restored position."""
        position, generators = self.position, source.generators()
        if len(generators) != len(position.generators):
            raise CheckpointError(
                f"the loader has {len(generators)} random generators, and the checkpoint has "
                f"{len(position.generators)}",
                remedy="build the loader as it was built when the checkpoint was saved",
            )
        self._resumes = False
        now = self._runtime.rng_state()
        draws_anew = getattr(source.batches, "persistent_workers", False) and position.epoch > 0
        if draws_anew:
            logger.warning("persistent loader workers start with new random numbers after a resume")
            iter(source.batches)  # starts the workers, which draws a number that later epochs do not draw
            self._runtime.set_rng_state(now)
        for generator, state in zip(generators, position.generators, strict=True):
            generator.set_state(state)
        if not position.taken:
            position.start = now
            return source.begin(position.epoch)
        saved, position.loader = position.loader, None
        if saved is None:
            _check_form(position.form, source.form())
            self._runtime.set_rng_state(position.start)
        elif source.is_stateful():
            source.loader.load_state_dict(saved)
        else:
            raise CheckpointError(
                "the checkpoint has the position of a stateful loader, and this "
                f"{type(source.loader).__name__} has no state_dict",
                remedy="give the loader it was saved with, or a checkpoint from the end of an epoch",
            )
        iterator = source.begin(position.epoch)
        for done in range(position.taken if saved is None else 0):
            batch = next(iterator, self)
            if batch is self:
                raise CheckpointError(
                    f"the checkpoint was saved after {position.taken} batches of an epoch, and the loader has only "
                    f"{done}",
                    remedy="give the loader the dataset and batch size it had when the checkpoint was saved",
                )
            if not done and not draws_anew and position.form.get(_FIRST) not in (None, checksum(batch)):
                self._log.warn(
                    "epoch %d began with another batch in the run that saved this checkpoint: its rest may repeat "
                    "rows, and omit others. If the data count epochs or draw an order themselves, give them "
                    "set_epoch(epoch), or give the loader state_dict() and load_state_dict(state); or save at the ends "
                    "of epochs",
                    position.epoch,
                )
        self._runtime.set_rng_state(now)  # `iter` and the earlier batches have drawn numbers
        return iterator


class EpochLoops:
    """Loops over the epochs of a stream, which count them.

    Attributes:
        total: the number of epochs that the script asked for last; None before it asks.
        batches: the number of batches of an epoch; None if it is unknown.
        epoch: the epoch in which the loop is; None outside of a loop, or if the script has moved the stream in it.
    """

    total: int | None = None
    batches: int | None = None
    epoch: int | None = None
    _number = 0

    def total_steps(self, accumulate: int) -> int | None:
        """Return the number of windows of all epochs; None if it is unknown."""
        if self.total is None or self.batches is None:
            return None
        return self.total * -(-self.batches // accumulate)

    def over(self, stream: DataStream, total: int) -> Iterator[int]:
        """Yield the epochs up to `total`. One ends when the next is asked for, even if its batches were not read."""
        self._number += 1
        number = self._number
        while stream.position.epoch < total:
            position, (loop, _) = stream.position, stream.place
            self.epoch = epoch = position.epoch
            try:
                yield epoch
            finally:  # also if the script leaves the loop
                self.epoch = None
            if number != self._number:
                raise TrainingError(
                    f"another loop over trainer.epochs(...) has run inside the loop over trainer.epochs({total})",
                    why=f"a trainer counts its epochs once: the outer loop was at epoch {epoch}, and the trainer is "
                    f"now at epoch {stream.position.epoch}",
                    remedy="write one loop over trainer.epochs(n), and give it all epochs",
                )
            restored = stream.position is not position
            if stream.position.epoch == epoch and stream.place[0] == loop:
                stream.position.epoch += 1
            elif stream.position.epoch == epoch and stream.position.taken and not restored:
                stream.end_epoch()  # its batches are read by `next`
            if restored and stream.position.epoch <= epoch:
                raise TrainingError(
                    f"the loop over trainer.epochs({total}) would come to epoch {stream.position.epoch} again",
                    why="trainer.resume() was called in it, and went back to an earlier checkpoint: it may never end",
                    remedy="call it once, before the loop; to go back while training, leave the loop by break, resume, "
                    "and begin another",
                )

    def check_epoch(self, begins: int) -> None:
        """Raise TrainingError if the loop is not in the epoch whose batches begin."""
        if self.epoch not in (None, begins):
            raise TrainingError(
                f"another loop over trainer.batches(...) begins in epoch {self.epoch} of trainer.epochs(...)",
                why="each loop over trainer.batches(...) is an epoch, and trainer.epochs(n) would skip the next one",
                remedy=f"{_OTHER_LOOPS}; to begin the epoch again, as after an error, set trainer.epoch = {self.epoch} "
                f"first, and outside of that loop trainer.epoch = {begins}; for two passes over the data, double n",
            )


class DataUse:
    """Use of the batches by the script, to detect batches that nothing trains on, and data from elsewhere.

    Attributes:
        keeps_epoch: whether the script has set the epoch.
        given: the steps of all trainers when the loop got its last batch; None if it got none.
    """

    def __init__(self, job: Collectives, log: Once) -> None:
        self._job, self._log = job, log
        self.keeps_epoch = False
        self.given: dict[int, tuple[int, int]] | None = None

    def note_batch(self) -> None:
        self.given = dict(self._job.steps)

    def warn_if_unused(self) -> None:
        """Warn once if no trainer has read batches here, or had its epoch set: in a job's first step, and at a `save`.

        In a job a script may divide its data itself. It looks the same as a script that forgot to.
        """
        if self.keeps_epoch or any(stream.has_moved for stream in _streams):
            return
        in_job = self._job.world_size > 1
        same = ", and all ranks train on the same data unless the script divides it" if in_job else ""
        self._log.warn(
            "no batch of this training came through trainer.batches(loader): checkpoints have no position in the "
            "data%s. Write `for batch in trainer.batches(loader):`. If the script finds its place in the data "
            "itself, let it set trainer.epoch = epoch before each epoch: this warning then ends",
            same,
        )

    def warn_if_untrained(self) -> None:
        """Log once if no trainer has made a step since the loop got its last batch, within an epoch."""
        if self.given == self._job.steps:
            self._log.warn(
                "trainer.save() was called before a step on the batch that the loop got last: a run that resumes "
                "from this checkpoint skips the batch. Call save after trainer(batch)"
            )


_streams: WeakSet[DataStream] = WeakSet()
"""The data of all trainers: a GAN's generator trains on batches that the critic's trainer reads."""


def _joined(begun: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    while begun:
        yield begun.pop()  # which does not keep the batch alive
    yield from rest


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
