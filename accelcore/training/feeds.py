"""The streams of batches that a training reads, by name."""

from __future__ import annotations

import logging
from typing import Any

from accelcore.roles.collectives import Collectives
from accelcore.roles.runtime import Runtime
from accelcore.training.batches import Feed
from accelcore.training.stream_checks import same_on_all_ranks, tensors_of

__all__ = ["Feeds"]

logger = logging.getLogger("accelcore")


class Feeds:
    """The streams of a training, by name.

    Args:
        counts: whether something beside the loop goes by the epochs of `"train"`.

    Attributes:
        speaks: whether this rank is the one that says what concerns all.
    """

    def __init__(self, runtime: Runtime, collectives: Collectives, *, counts: bool = False) -> None:
        self._runtime, self._collectives = runtime, collectives
        self._feeds: dict[str, Feed] = {}
        self.speaks = collectives.rank == 0
        self._counts, self._checked_read, self._checked_shared = counts, False, collectives.world_size == 1

    def __getitem__(self, name: str) -> Feed:
        if name not in self._feeds:
            self._feeds[name] = Feed(self._runtime, self._collectives)
        return self._feeds[name]

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

    def check_shared(self, batch: Any) -> None:
        """Warn, once, where every rank of a job trains on the same batch, which came from no stream of these."""
        if self._checked_shared:
            return
        self._checked_shared = True
        if any(feed.taken for feed in self._feeds.values()):
            return
        same = same_on_all_ranks(batch, self._collectives, self._runtime.device)
        if same and tensors_of(batch) and self.speaks:
            logger.warning(
                "every rank of this job trains on the same batch: write `for batch in trainer.batches(loader):`, which "
                "gives each rank its share"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position of each, as `load_state_dict` takes it."""
        return {name: feed.state_dict() for name, feed in self._feeds.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be at saved positions; a stream that has none is at its beginning."""
        for name in {*self._feeds, *state}:
            self[name].load_state_dict(state.get(name))
