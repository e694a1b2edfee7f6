"""A faster way to multiply that costs something each time: measured once, then reckoned with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Bargain"]

Way = TypeVar("Way")
Size = TypeVar("Size")

_ROUNDS = 7


@dataclass(frozen=True)
class Bargain:
    """What another way costs and gains on this machine, in seconds.

    Attributes:
        cost: each time that it is taken.
        gain: with each multiplication or addition; not above 0 where the way is not quicker.
    """

    cost: float
    gain: float

    @classmethod
    def measure(
        cls, run: Callable[[Way, Size], None], ways: tuple[Way, Way], small: Size, large: Size, *, operations: int
    ) -> Bargain:
        """Compare `ways`, the usual and the other, by `run(way, size)`; a large one takes so many `operations`.

        The shortest of a few runs in turn counts: what else the machine does only makes them longer.
        """
        usual_small, other_small = _shortest(run, ways, small, times=20)
        usual, other = _shortest(run, ways, large, times=1)
        cost = max(0.0, other_small - usual_small)
        saved = usual - other
        # A twentieth is within what such a measurement can be wrong by.
        gain = (saved + cost) / operations if saved > 0.05 * usual else 0.0
        return cls(cost, gain)

    @classmethod
    def ratio(cls, run: Callable[[Way, Size], None], ways: tuple[Way, Way], size: Size) -> float:
        """How many times as long the other way takes."""
        usual, other = _shortest(run, ways, size, times=1)
        return other / usual

    def of(self, times: int, operations: int) -> float:
        """Seconds gained where the way is taken so many times for so many operations; lost where they are below 0."""
        return operations * self.gain - times * self.cost


def _shortest(
    run: Callable[[Way, Size], None], ways: tuple[Way, Way], size: Size, *, times: int
) -> tuple[float, float]:
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for way, seconds in zip(ways, found, strict=True):
            began = time.perf_counter()
            for _ in range(times):
                run(way, size)
            seconds.append((time.perf_counter() - began) / times)
    return min(found[0]), min(found[1])
