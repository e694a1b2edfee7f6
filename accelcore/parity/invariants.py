"""What holds within one run however its numbers are rounded, so that a difference needs no tolerance to be named.

A step begins with the weights and the optimizer state with which the step before has ended. All ranks that hold a whole
gradient hold the same one after it is reduced. An operator is as close to its float64 result as its dtype allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from accelcore.parity.events import Event, Seen, Step

__all__ = ["BEFORE", "certainly_wrong", "moved", "odd_ranks"]

BEFORE = {"weight": ("parameter", "buffer"), "old state": ("state",)}
"""Kinds of events at the start of a step, and of those at the end of the step before that show the same tensor."""


def moved(seen: Seen, before: Mapping[Event, Tensor]) -> Tensor | None:
    """Return how far a tensor has moved since the end of the step before; None if it was not seen there."""
    for kind in BEFORE[seen.event.kind]:
        after = before.get(seen.event._replace(kind=kind))
        if after is not None:
            return seen.values.double() - after.double() if after.shape == seen.values.shape else None
    return None


def odd_ranks(steps: Mapping[int, Step]) -> dict[Event, int]:
    """Return the reduced gradients that differ among ranks, each with the rank that is least like their mean."""
    ranks = {
        rank: {seen.event: seen.values.double().nan_to_num() for seen in step.seen} for rank, step in steps.items()
    }
    found = {}
    for event in [event for event in next(iter(ranks.values()), {}) if event.kind == "reduced"]:
        held = {rank: events[event] for rank, events in ranks.items() if event in events}
        shapes = {values.shape for values in held.values()}
        whole = len(held) == len(ranks) and len(shapes) == 1  # not shards, nor gradients that few ranks have
        if whole and len({tuple(values.tolist()) for values in held.values()}) > 1:
            own = [_last(events, event._replace(kind="gradient")) for events in ranks.values()]
            mean = sum(
                (each for each in own if each is not None and {each.shape} == shapes),
                torch.zeros(*shapes, dtype=torch.float64),
            )
            unlike = {rank: _unlike(values, mean) for rank, values in held.items()}
            found[event] = max(unlike.items(), key=itemgetter(1))[0]
    return found


def _last(events: dict[Event, Tensor], event: Event) -> Tensor | None:
    """Return an event's values when it was last seen: a gradient after all micro-batches."""
    return next((values for key, values in reversed(events.items()) if key._replace(number=0) == event), None)


def _unlike(values: Tensor, mean: Tensor) -> float:
    """Return how much of `values` is not a multiple of `mean`: sums, clipped and unscaled gradients are multiples."""
    factor = (values @ mean / (mean @ mean)).nan_to_num(0.0)
    return float(((values - factor * mean).norm() / values.norm()).nan_to_num(0.0))


def certainly_wrong(checked: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """Return the first operator of a step that is wrong for its own inputs beyond doubt."""
    return next((each for each in checked if each["step"] == step and each["is_certain"]), None)
