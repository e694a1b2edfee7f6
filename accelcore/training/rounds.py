"""Dividing a stream that every rank reads alike: in each round of as many items as there are ranks, each takes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

__all__ = ["Last", "rounds"]

Item = TypeVar("Item")

Last = Literal["repeat", "drop", "uneven"]
"""A last round that is not full: `"repeat"`, who gets nothing takes its first item; `"drop"`, nobody takes any;
`"uneven"`, some ranks have one item more than others."""


def rounds(items: Iterable[Item], rank: int, world_size: int, last: Last) -> Iterator[Item]:
    """A rank's item of each round.

    Unless `last` is `"uneven"`, ranks get as many, and an item is given out when its round was read to the end: all
    ranks are then at one place in the stream.
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
