"""Combinations of parameters of which only some are tried in every run; `full` tries all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Iterable[Any]) -> list[Any]:
    """Return every combination of one value of each axis, as parameters of a test; most are marked `full`.

    In those without the mark, any two values of two axes meet. A fault that needs three of them is rare.
    """
    values = [list(axis) for axis in axes]
    pairs = {each: set(combinations(enumerate(each), 2)) for each in product(*(range(len(axis)) for axis in values))}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        best = max(pairs, key=lambda each: len(pairs[each] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [_parameters(values, each, each in chosen) for each in pairs]


def diagonals(first: Iterable[Any], second: Iterable[Any], count: int = 1) -> list[Any]:
    """As `pairwise` of two axes, where each value meets at least `count` values of the other axis, and not all."""
    values = [list(first), list(second)]
    size = min(map(len, values))
    every = product(*(range(len(axis)) for axis in values))
    return [_parameters(values, each, sum(each) % size < count) for each in every]


def _parameters(values: list[list[Any]], indices: tuple[int, ...], chosen: bool) -> Any:
    marks = () if chosen else pytest.mark.full
    return pytest.param(*(axis[index] for axis, index in zip(values, indices, strict=True)), marks=marks)
