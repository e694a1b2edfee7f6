"""Counting epochs: those that are left of a training."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from accelcore.errors import ConfigurationError
from accelcore.training.batches import Feed

__all__ = ["epochs"]

logger = logging.getLogger("accelcore")


def epochs(feed: Feed, total: int, *, speaks: bool) -> Iterator[int]:
    """The epochs of `feed` that are left of `total`.

    An epoch is over when the loop asks for the next one, also where its batches were not read through the feed.

    Args:
        speaks: whether this rank says that none is left.

    Raises:
        ConfigurationError: `total` is no number of epochs.
    """
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ConfigurationError(f"{total!r} is not a number of epochs", remedy="give a whole number, 0 or more")
    if 0 < total <= feed.epoch and speaks:
        logger.warning(
            "this training is finished: %d of %d epochs are done; to go on ask for more of them, to begin anew save to "
            "another folder, or delete this one",
            feed.epoch,
            total,
        )
    return _left(feed, total)


def _left(feed: Feed, total: int) -> Iterator[int]:
    while feed.epoch < total:
        epoch, turn = feed.epoch, feed.turn
        yield epoch
        if feed.epoch == epoch and feed.turn == turn:
            feed.epoch += 1
