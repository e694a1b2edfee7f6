"""Differences that need no tolerance, and whether a difference begins where it was seen first.

A step begins with the weights and the optimizer state with which the step before has ended. All ranks that hold a whole
gradient hold the same one after it is reduced. Rounding changes neither. A difference begins at an item if all that the
item was computed from was seen, and agreed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from accelcore.parity.events import Event, Seen, Step

BEFORE = {"weight": ("parameter", "buffer"), "old state": ("state",)}
"""Kinds of events at the start of a step, and of those at the end of the step before that show the same tensor."""
_FORWARD = ("batch", "input", "output")
_OPERATORS = (*_FORWARD, "operator", "operator of backward", "grad")


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


def begins_at(
    parted: Seen, both: tuple[Step, Step], compared: Sequence[Event], *, before: Container[Event] | None, ranks: bool
) -> bool | None:
    """Return True if all that an event was computed from is among the events that agree; None if that is not known.

    A batch, initial weights and random numbers come from outside the training: a difference of them begins there. A
    loss or a norm was computed from more than was seen, such as the targets.

    `compared` are the events of this step that were compared, in order; `before`, those of the step before, None in the
    first step. `ranks`: whether the other ranks were compared, too; there may be none.
    """
    event = parted.event
    kind, module, name = event.kind, event.module, event.item.rpartition(" of ")[2]
    agreed = compared[: compared.index(event)]
    items = {(each.kind, each.module, each.item) for each in agreed}
    modules = {(each.kind, each.module) for each in agreed}
    if kind == "batch":
        known = not any(each.kind == "output" for each in agreed)  # another model may have made it
    elif kind in BEFORE:
        known = before is None or any(event._replace(kind=each) in before for each in BEFORE[kind])
    elif kind in ("input", "output"):
        known = not _alone(event, both, _FORWARD)
    elif kind.startswith("operator"):  # those outside all modules read what was not seen, such as targets
        known = bool(module) and not _alone(event, both, _OPERATORS)
    elif kind == "grad":
        known = parted.source != module and ("grad", parted.source) in modules
    elif kind in ("buffer", "gradient"):
        known = ("output" if kind == "buffer" else "grad", module) in modules
    elif kind == "reduced":
        known = ranks and ("gradient", module, event.item) in items
    else:
        known = kind == "random" or {("reduced", module, name), ("weight", module, name)} <= items
    return known or None


def _alone(event: Event, both: tuple[Step, Step], kinds: Sequence[str]) -> bool:
    """Return whether one run saw something before this event that the other did not see."""
    seen = [[each.event for each in step.seen] for step in both]
    everywhere = set(seen[0]) & set(seen[1])
    return any(
        each.kind in kinds and each not in everywhere for events in seen for each in events[: events.index(event)]
    )
