"""Timing cases against each other, on a machine that may have other work to do.

Every round runs every case once, so that whatever slows the machine down for a while slows all of them down; a ratio
is taken between two samples of the same round, and the median over the rounds is what counts. The order within a
round changes, so that no case always follows the same other one.

A comparison should hold a twin of its base: the same work, made a second time. The twin's ratio is the noise floor,
the difference that means nothing.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

__all__ = ["Case", "Samples", "Spread", "Timing", "compare", "sample"]

Case = Callable[[], object]
Clock = Callable[[], float]
Samples = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Spread:
    """Where the values of many rounds lie."""

    median: float
    lower_quartile: float
    upper_quartile: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of two values or more."""
        lower, median, upper = quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, min(values), max(values))


@dataclass(frozen=True)
class Timing:
    """One case's seconds, and its ratios to the base."""

    seconds: Spread
    ratio: Spread


def sample(
    cases: Mapping[str, Case],
    *,
    rounds: int,
    seconds: float = 0.0,
    per: int = 1,
    clock: Clock = perf_counter,
    ready: Callable[[], object] | None = None,
    seed: int = 0,
) -> Samples:
    """Time every case once a round, without the garbage collector.

    Args:
        cases: what to call, by name. Each is called a few times beforehand, to warm up.
        rounds: how many samples each case gets, 2 or more.
        seconds: about how long one sample lasts at least; a case that is done sooner is repeated in it.
        per: how many units of work one call does.
        clock: `time.process_time` where all the work is this process's own and none of it waits: other programs'
            turns on the processor are then no part of a sample.
        ready: called before each sample, outside it; what lets several processes that call this alike begin at once.
            Then `seconds` has to be 0: they would not repeat a case as often.
        seed: of the order of the cases.

    Returns:
        For each case the seconds per unit of work, round by round.
    """
    assert ready is None or seconds == 0, "processes that time together cannot choose their repeats alone"
    repeats = {name: _repeats(case, seconds, clock) for name, case in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    shuffle = random.Random(seed).shuffle
    with _garbage_kept():
        for number in range(rounds):
            if number % len(order) == 0:
                shuffle(order)
            for name in order:
                if ready is not None:
                    ready()
                samples[name].append(_time(cases[name], repeats[name], clock) / (repeats[name] * per))
            order.append(order.pop(0))  # in as many rounds as there are cases, each has every place once
            gc.collect()
    return samples


def compare(samples: Samples, base: str) -> dict[str, Timing]:
    """The spread of each case's seconds, and of its ratio to the base in the same round."""
    return {
        name: Timing(Spread.of(own), Spread.of([mine / other for mine, other in zip(own, samples[base], strict=True)]))
        for name, own in samples.items()
    }


def _repeats(case: Case, seconds: float, clock: Clock) -> int:
    if _time(case, 1, clock) > 3 * seconds:
        return 1  # the first call may be a slow one, but not by that much
    fastest = min(_time(case, 1, clock) for _ in range(5))
    return max(1, math.ceil(seconds / fastest))


def _time(case: Case, repeats: int, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        case()
    return clock() - start


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No collection but those asked for, which then look only at what is made inside."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
