"""The streams of batches that a training reads, by name."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from accelcore.roles.collectives import Collectives
from accelcore.roles.runtime import Runtime
from accelcore.training.batches import Feed

__all__ = ["Feeds"]

logger = logging.getLogger("accelcore")

_all: WeakSet[Feeds] = WeakSet()
"""Those of all trainers: one may train on what another reads."""


class Feeds:
    """The streams of a training, by name.

    Args:
        counts: whether the schedule, too, goes by the epochs of `"train"`.

    Attributes:
        speaks: whether this rank is the one that says what concerns all.
    """

    def __init__(self, runtime: Runtime, collectives: Collectives, *, counts: bool = False) -> None:
        self._runtime, self._collectives = runtime, collectives
        self._feeds: dict[str, Feed] = {}
        self.speaks = collectives.rank == 0
        self._counts, self._checked_read, self._checked_first = counts, False, False
        self._in_job = collectives.world_size > 1
        _all.add(self)

    def __getitem__(self, name: str) -> Feed:
        if name not in self._feeds:
            self._feeds[name] = Feed(self._runtime, self._collectives)
        return self._feeds[name]

    @property
    def is_read(self) -> bool:
        """Whether a loop over one of them is under way."""
        return any(feed.taken for feed in self._feeds.values())

    def count_epochs(self, steps: int) -> int:
        """The epoch of `"train"`, for a loop that counts epochs, after so many `steps`."""
        self._counts = True
        self.check_read(steps)
        return self["train"].epoch

    def check_read(self, steps: int) -> None:
        """Warn, once, where epochs are counted, and `steps` were made of batches that came through no stream."""
        read = any(feed.epoch or feed.taken for feed in self._feeds.values())
        if not self._counts or self._checked_read or read or not steps:
            return
        self._checked_read = True
        if self.speaks:
            logger.warning(
                "no batch of this training came through trainer.batches(loader): its place in the data is not saved, a "
                "resumed run begins at epoch 0, and in a job each rank trains on all of the data. Write `for batch in "
                "trainer.batches(loader):`, or count by yourself and set trainer.epoch"
            )

    def check_first(self) -> None:
        """Warn, once, where the first batch came through no stream: in a job, and where epochs are counted.

        It may have come through another trainer's, as that of a generator does in the loop of its critic.
        """
        if self._checked_first:
            return
        self._checked_first = True
        if any(feed.epoch or feed.taken for feed in self._feeds.values()):
            return
        if self._in_job and any(feeds.is_read for feeds in _all):
            return
        if self._in_job and self.speaks:
            logger.warning(
                "this job trains on batches that came through no trainer.batches(loader): unless each rank has a share "
                "of its own by other means, each trains on all of the data. Write `for batch in "
                "trainer.batches(loader):`, with shard=False where the loader divides the data itself"
            )
        elif self._counts:
            self.check_read(1)

    def state_dict(self) -> dict[str, Any]:
        """The position of each, as `load_state_dict` takes it."""
        return {name: feed.state_dict() for name, feed in self._feeds.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be at saved positions; a stream that has none is at its beginning."""
        for name in {*self._feeds, *state}:
            self[name].load_state_dict(state.get(name))
