"""Which differences count, and whether one begins where it was seen first.

Random numbers, batches, and what a step begins with need no tolerance, however far rounding has driven two runs apart:
a step begins with the weights and the optimizer state with which the step before has ended, and all ranks that hold a
whole gradient hold the same one after it is reduced. For everything else, the tolerance is a number of units of
rounding, times how far the events before it are apart.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcore.layerwise import Distance, distance, size_of, unit_of
from accelcore.parity.events import PHASE_OF, Event, Seen, SeenStep

BEFORE = {"weight": ("parameter", "buffer"), "old state": ("state",)}
"""Kinds of events at the start of a step, and of those at the end of the step before that show the same tensor."""
_FORWARD = ("batch", "input", "output")
_OPERATORS = (*_FORWARD, "operator", "operator of backward", "grad")
_FREE = 256.0  # units of rounding by which one event may be off if all before it agree
_FREE_BACKWARD = 4096.0  # the same in backward, where terms cancel
_SHARE = 0.05
"""Share of an update by which it may differ, where rounding differs: adaptive optimizers amplify small gradients."""
_RATE = 1e-4  # relative difference of learning rates that is rounding, as of a schedule of fp32 numbers
_FREE_UPDATE = 4.0  # units of rounding of the parameter by which an update may differ besides
_HIDDEN = 0.02  # relative difference of the weights from which on only what needs no tolerance is compared
WITHOUT_TOLERANCE = (
    "batches, random numbers, learning rates, what a step begins with, operators and equal gradients of all ranks"
)

Both = tuple[SeenStep, SeenStep]  # a step of two runs: of the recording, and of the replay
Pairs = Sequence[tuple[Seen, Seen]]  # events that two runs have in common: of the recording, and of the replay


class Parted(NamedTuple):
    """The event that diverges first, the difference in units of rounding, and whether it is a mask's."""

    seen: Seen
    ratio: float
    masks: bool = False


def first_unequal(pairs: Pairs) -> Parted | None:
    """Return the first event that has other bits."""
    for mine, theirs in pairs:
        apart = distance(mine.values, theirs.values)
        if not apart.equal and not (mine.event.kind == "learning rate" and apart.error <= _RATE * apart.size):
            return Parted(mine, apart.ratio(unit_of(mine.values.dtype)), apart.masks)
    return None


def hides(pairs: Pairs) -> bool:
    """Return whether the parameters are so far apart that a fault can no longer be told from rounding."""
    apart = [distance(mine.values, theirs.values) for mine, theirs in pairs if mine.event.kind == "parameter"]
    return any(each.error > _HIDDEN * each.size for each in apart)


@dataclass
class Tolerance:
    """The comparison of one step of two runs up to rounding."""

    both: Both
    pairs: Pairs  # the events that are compared
    coarsest: float  # rounding of the coarsest dtype within compiled code
    before: tuple[Mapping[Event, Tensor], Mapping[Event, Tensor]]  # what was seen last at the end of a step
    odd: Container[Event]  # reduced gradients that are other ones on this rank than on all others
    is_hidden: bool  # whether only what needs no tolerance is compared
    # kinds of gradients that the runs may scale otherwise, by a loss scale, a strategy, or clipping within an
    # optimizer's kernel. They are compared up to a factor, which is that of the first one of a step.
    scaled: Container[str]

    def __post_init__(self) -> None:
        self._units = [_units(step, self.coarsest) for step in self.both]
        self._scales = _scales(self.pairs)
        self._weights, self._reduced = _by_place(self.pairs, "weight"), _by_place(self.pairs, "reduced")
        self._factors: dict[tuple[bool, torch.dtype], float] = {}
        self._carried = 1.0  # by how many units of rounding the events so far are apart
        self._computes = False  # whether an event so far is of the step's own arithmetic
        self._noisy: set[tuple[str, str]] = set()  # parameters whose gradients are apart by more than a small share

    def first(self, wrong: Mapping[str, Any] | None) -> Parted | None:
        """Return the first event that is further apart than rounding explains; `wrong` is an operator that is wrong."""
        for mine, theirs in self.pairs:
            self._computes = self._computes or mine.event.kind not in ("random", "weight", "batch")
            if self._computes and wrong is not None:
                kind = "operator of backward" if wrong["backward"] else "operator"
                event = Event(kind, wrong["module"], f"{wrong['operator']} 0")
                return Parted(mine._replace(event=event), wrong["ratio"])
            apart = distance(mine.values, self._unscaled(mine, theirs))
            ratio = self._excess(mine, theirs, apart)
            if ratio is not None:
                return Parted(mine, ratio, apart.masks)
        return None

    def _unscaled(self, mine: Seen, theirs: Seen) -> Tensor:
        """Return the replayed values, divided by the factor that gradients of this kind and dtype have in common."""
        kind, values = mine.event.kind, theirs.values
        if kind not in self.scaled or values.shape != mine.values.shape:
            return values
        recorded, replayed = mine.values.double(), values.double()
        group = kind == "reduced", values.dtype
        if group not in self._factors and bool(recorded.any()):
            factor = float((recorded @ replayed) / (recorded @ recorded))
            self._factors[group] = factor if factor > 0 and math.isfinite(factor) else 1.0
        return replayed / self._factors.get(group, 1.0)

    def _excess(self, mine: Seen, theirs: Seen, apart: Distance) -> float | None:
        """Return how many units of rounding an event is apart; None if that is explained."""
        event, kind = mine.event, mine.event.kind
        own = max(unit_of(mine.values.dtype), unit_of(theirs.values.dtype))
        unit = max(found.get(event, own) for found in self._units)
        if kind == "random" or (kind == "batch" and not self._computes):  # the script's own, of no other model
            return apart.ratio(own) if apart.error > _FREE * own * apart.size else None
        if kind == "learning rate":
            return apart.ratio(own) if apart.error > _RATE * apart.size else None
        if kind in BEFORE:
            return self._excess_at_start(mine, theirs, apart, own, unit)
        if kind == "reduced" and event in self.odd:
            return apart.ratio(unit)
        if self.is_hidden:
            return None
        if own == 0:
            return apart.ratio(own) if apart.error > 0 else None
        if kind == "parameter":
            return self._excess_of_update(mine, theirs, unit)
        if kind == "state" and (event.module, event.item.rpartition(" of ")[2]) in self._noisy:
            return None
        backward = PHASE_OF[kind] in ("backward", "collective", "update")
        ratio = apart.ratio(unit, self._scales.get((kind, event.module), 0.0))
        if ratio > (_FREE_BACKWARD if backward else _FREE) * self._carried:
            return ratio
        if kind in ("gradient", "reduced") and apart.error > max(1e-3, 8 * unit) * apart.size:
            self._noisy.add((event.module, event.item))
        self._carried = max(self._carried, ratio / 16 if backward else ratio)
        return None

    def _excess_at_start(self, mine: Seen, theirs: Seen, apart: Distance, own: float, unit: float) -> float | None:
        """Compare how far a tensor has moved since the end of the step before; in the first step, the tensor itself."""
        if mine.event.kind == "weight":
            self._carried = max(self._carried, apart.ratio(unit))
        moves = moved(mine, self.before[0]), moved(theirs, self.before[1])
        if moves[0] is not None and moves[1] is not None:
            by = distance(moves[0], moves[1])
            # If the script itself changes weights between steps, it changes other weights otherwise.
            explained = _FREE * own * apart.size * (self._carried if bool(moves[0].any()) else 1.0)
            return by.error / (own * apart.size or 1.0) if by.error > explained else None
        return apart.ratio(unit) if not self.before[0] and apart.ratio(unit) > _FREE else None

    def _excess_of_update(self, mine: Seen, theirs: Seen, unit: float) -> float | None:
        """Compare two updates at the elements at which the gradients of both runs are alike.

        An adaptive optimizer makes a whole update of a gradient that is nothing but rounding.
        """
        place = mine.event.module, mine.event.item
        if place in self._noisy or place not in self._weights:
            return None
        share, old = max(_SHARE, 64 * unit), self._weights[place]
        moves = [
            after.values.double() - first.values.double() for after, first in zip((mine, theirs), old, strict=True)
        ]
        reduced = self._reduced.get(place)
        if reduced is not None and all(seen.values.shape == mine.values.shape for seen in reduced):
            one, other = (seen.values.double() for seen in reduced)
            alike = (one - other).abs() <= share / 2 * torch.maximum(one.abs(), other.abs())
            moves = [move[alike] for move in moves]
        apart, floor = distance(*moves), unit * size_of(mine.values)
        return apart.error / (floor or unit) if apart.error > share * apart.size + _FREE_UPDATE * floor else None


def _units(step: SeenStep, coarsest: float) -> dict[Event, float]:
    """Return for each event the rounding of the coarsest dtype so far in the step."""
    units = accumulate((unit_of(seen.values.dtype) for seen in step.seen), max, initial=coarsest)
    return dict(zip((seen.event for seen in step.seen), list(units)[1:], strict=True))


def _by_place(pairs: Pairs, kind: str) -> dict[tuple[str, str], tuple[Seen, Seen]]:
    return {(pair[0].event.module, pair[0].event.item): pair for pair in pairs if pair[0].event.kind == kind}


def _scales(pairs: Pairs) -> dict[tuple[str, str], float]:
    """Return the size of the largest gradient in each module: that of a bias may be nothing but rounding."""
    found: dict[tuple[str, str], float] = {}
    for mine, _ in pairs:
        if mine.event.kind in ("gradient", "reduced"):
            key = (mine.event.kind, mine.event.module)
            found[key] = max(found.get(key, 0.0), size_of(mine.values))
    return found


def moved(seen: Seen, before: Mapping[Event, Tensor]) -> Tensor | None:
    """Return how far a tensor has moved since the end of the step before; None if it was not seen there."""
    for kind in BEFORE[seen.event.kind]:
        after = before.get(seen.event._replace(kind=kind))
        if after is not None:
            return seen.values.double() - after.double() if after.shape == seen.values.shape else None
    return None


def odd_ranks(steps: Mapping[int, SeenStep]) -> dict[Event, int]:
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
                torch.zeros(*shapes, dtype=torch.float64, device="cpu"),
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
    parted: Seen, both: Both, compared: Sequence[Event], *, before: Container[Event] | None, ranks: bool
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
        known = kind in ("random", "learning rate") or {("reduced", module, name), ("weight", module, name)} <= items
    return known or None


def _alone(event: Event, both: Both, kinds: Sequence[str]) -> bool:
    """Return whether one run saw something before this event that the other did not see."""
    seen = [[each.event for each in step.seen] for step in both]
    everywhere = set(seen[0]) & set(seen[1])
    return any(
        each.kind in kinds and each not in everywhere for events in seen for each in events[: events.index(event)]
    )
