"""Parameter groups that a kernel can update together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

__all__ = ["alike", "merged"]

_NAMES = ("params", "param_names", "initial_lr")
"""What a group says beside options of the update."""


def alike(groups: Sequence[dict[str, Any]]) -> list[int]:
    """For each group, the number of the first with equal options, its own if there is none before it.

    An update that looks at no group as a whole gives the same result for two such groups as for one of both. Options
    that are no numbers, words or tuples of these, such as tensors, are equal where they are the same object.
    """
    known: list[tuple[int, dict[str, Any]]] = []
    firsts = []
    for number, group in enumerate(groups):
        options = {key: _comparable(value) for key, value in group.items() if key not in _NAMES}
        first = next((first for first, known_options in known if known_options == options), None)
        if first is None:
            known.append((first := number, options))
        firsts.append(first)
    return firsts


def merged(groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The groups, those with equal options as one."""
    if len(groups) == 1:
        return groups
    members: dict[int, list[dict[str, Any]]] = {}
    for first, group in zip(alike(groups), groups, strict=True):
        members.setdefault(first, []).append(group)
    return [
        {**same[0], "params": list(chain.from_iterable(group["params"] for group in same))} for same in members.values()
    ]


def _comparable(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return value if value is None or isinstance(value, int | float | str) else id(value)
