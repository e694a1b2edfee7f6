"""Compare two recordings: the first event that parts, in the order of the recording."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcore.errors import RecordingError
from accelcore.parity.cause import BEFORE, begins_at, moved, odd_ranks
from accelcore.parity.events import PHASE_OF, Event, Seen, Step
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.result import Result
from accelcore.parity.rounding import distance, size_of, unit_of
from accelcore.parity.settings import arithmetic, differences

_FREE = 256.0
"""Units of rounding by which one event may be off if all before it agree."""
_FREE_BACKWARD = 4096.0
"""The same in backward, where terms cancel."""
_SHARE = 0.05
"""Share of an update by which it may differ, where rounding differs: adaptive optimizers amplify small gradients."""
_FREE_UPDATE = 4.0
"""Units of rounding of the parameter by which an update may differ besides."""
_HIDDEN = 0.02
"""Relative difference of the weights from which on only what needs no tolerance is compared."""
_WITHOUT_TOLERANCE = "batches, random numbers, what a step begins with, operators and equal gradients of all ranks"
_AT_THE_END = frozenset(kind for kinds in BEFORE.values() for kind in kinds)
_SAME_IN_EVERY_JOB = ("weight", "reduced", "norm", "old state", "state", "parameter", "buffer")
"""Kinds of events that do not depend on how a batch is divided among ranks."""


class _Parted(NamedTuple):
    seen: Seen
    ratio: float
    masks: bool = False


def compare(reference: Path | str, other: Path | str, *, rank: int | None = None) -> Result:
    """Compare two recordings, and return where they part first.

    Args:
        reference, other: the folders of the recordings.
        rank: the rank to compare; None for all that both have.

    Raises:
        RecordingError: a folder has no recording, one is damaged, or they have no step or module in common.
    """
    folders, others = ranks_of(Path(reference)), ranks_of(Path(other))
    ranks = sorted(others) if rank is None else [rank]
    # A rank that was not recorded is compared with the first: gradients and weights do not depend on the rank.
    recorded = {each: Reader(folders.get(each, folders[min(folders)])) for each in ranks}
    replayed = {each: Reader(others[each]) for each in ranks}

    @cache
    def odd(number: int) -> Mapping[Event, int]:
        """Return the reduced gradients of a step that differ among ranks only in the replay, and the odd rank."""
        both = [
            {each: reader.step(number) for each, reader in readers.items() if number in reader.steps}
            for readers in (recorded, replayed)
        ]
        found = odd_ranks(both[1])
        differ = odd_ranks(both[0]) if found else {}
        return {event: each for event, each in found.items() if event not in differ}

    everywhere = set(ranks) >= folders.keys() | others.keys()
    results = [_Comparison(each, recorded[each], replayed[each], odd, everywhere=everywhere).result() for each in ranks]
    parted = [result for result in results if not result.agrees]
    order = {phase: number for number, phase in enumerate(PHASE_OF.values())}
    first = min(parted, key=lambda each: (each.step or 0, order.get(each.phase or "", 0), each.rank or 0), default=None)
    return results[0] if first is None else replace(first, next=first.next or _next(first))


class _Comparison:
    """The comparison of one rank; `odd` returns the gradients of a step that ranks do not share."""

    def __init__(
        self, rank: int, recorded: Reader, replayed: Reader, odd: Callable[[int], Mapping[Event, int]], *,
        everywhere: bool,
    ) -> None:  # fmt: skip
        self._rank, self._readers, self._odd, self._everywhere = rank, (recorded, replayed), odd, everywhere
        self._facts = replayed.facts
        self._settings = differences(recorded.facts["settings"], self._facts["settings"])
        changed = {each.name for each in self._settings}
        self._kinds = _SAME_IN_EVERY_JOB if "ranks" in changed else tuple(PHASE_OF)
        self._divided = not changed.isdisjoint(("ranks", "trainer parallel"))
        self._exact = not arithmetic(self._settings) and not self._facts.get("took_batches")
        self._coarsest = max(_compiled_unit(each.facts["settings"]) for each in self._readers)
        # What was seen last at the end of a step, in both runs.
        self._before: tuple[dict[Event, Tensor], dict[Event, Tensor]] = ({}, {})
        self._is_hidden = False  # whether rounding has grown so far that only what needs no tolerance is compared

    def result(self) -> Result:
        """Compare step by step, and return where the runs part."""
        if stored := self._facts.get("result"):  # of two sizes of a batch
            return Result(**stored)
        counts = [len(reader.steps) for reader in self._readers]
        notes = list(self._facts.get("notes", []))
        if not all(counts):
            raise RecordingError(
                "the two recordings have no step in common", remedy="let the replay run one step at least"
            )
        if counts[1] < counts[0]:
            notes.append(f"the replay has {counts[1]} of {counts[0]} steps")
        for number in range(1, min(counts) + 1):
            both = self._readers[0].step(number), self._readers[1].step(number)
            pairs = self._pairs(both)
            if not pairs:
                raise RecordingError(
                    f"step {number} of the two recordings has nothing in common",
                    why="no module or parameter has the same name, or the ranks divide the batch otherwise",
                    remedy="replay the script that was recorded",
                )
            checked = [each for each in self._facts.get("checked", []) if each["step"] == number]
            found = None
            if number == 1 and (others := self._facts.get("other_weights")):
                module, _, item = others[0].rpartition(".")
                found = Result(
                    agrees=False, steps=0, exact=self._exact, phase="weights", module=module, item=f"weight {item}",
                    is_cause=True, ratio=math.inf,
                )  # fmt: skip
            elif parted := _exactly(pairs) if self._exact else self._by_rounding(number, both, pairs, checked):
                found = _with_operator(_result(parted, exact=self._exact), both, checked)
                before = self._before[0] if number > 1 else None
                compared = [mine.event for mine, _ in pairs]
                cause = found.is_cause or begins_at(parted.seen, both, compared, before=before, ranks=self._everywhere)
                found = replace(found, is_cause=cause)
            if found is not None:
                notes += found.notes
                found = replace(found, settings=self._settings, notes=tuple(notes))
                return replace(found, steps=number, step=number, rank=self._rank)
            for mine, theirs in pairs:
                if mine.event.kind in _AT_THE_END:  # kept until it is seen again: each optimizer has steps of its own
                    self._before[0][mine.event], self._before[1][mine.event] = mine.values, theirs.values
            if not self._exact and not self._is_hidden and _hides(pairs):
                self._is_hidden = True
                notes.append(f"after step {number} rounding hides differences: only {_WITHOUT_TOLERANCE} are compared")
        return Result(
            agrees=True, steps=min(counts), exact=self._exact, settings=self._settings, notes=tuple(notes)
        )  # fmt: skip

    def _pairs(self, both: tuple[Step, Step]) -> list[tuple[Seen, Seen]]:
        """Return the events that both steps have, in the recording's order.

        If the runs may have divided a model otherwise, a tensor of another shape is a shard, and is left out. So are
        the operators of a module that computes by other operators in one run: which correspond is not known.
        """
        seen = [{each.event: each for each in step.seen if each.event.kind in self._kinds} for step in both]
        mine_of, theirs_of = map(_operators, seen)
        order = [event for event in seen[0] if event in seen[1] and event.kind != "old state"]
        updated = next((index for index, event in enumerate(order) if event.kind in ("state", "parameter")), len(order))
        order[updated:updated] = dict.fromkeys(event for each in seen for event in each if event.kind == "old state")
        pairs = []
        for event in order:
            mine, theirs = (events.get(event) for events in seen)
            mine, theirs = mine or _unchanged(theirs, self._before[0]), theirs or _unchanged(mine, self._before[1])
            if mine is None or theirs is None or (self._divided and mine.shape != theirs.shape):
                continue
            if mine_of.get(event[:2]) == theirs_of.get(event[:2]):
                pairs.append((mine, theirs))
        return pairs

    def _by_rounding(
        self,
        number: int,
        both: tuple[Step, Step],
        pairs: Sequence[tuple[Seen, Seen]],
        checked: Sequence[Mapping[str, Any]],
    ) -> _Parted | None:
        """Return the first event that is further apart than what it was computed from explains."""
        carried, computes, scales = 1.0, False, _scales(pairs)
        units = [_units(step, self._coarsest) for step in both]
        wrong = next((each for each in checked if each["is_certain"]), None)
        noisy: set[tuple[str, str]] = set()
        entered, reduced = (
            {(mine.event.module, mine.event.item): (mine, theirs) for mine, theirs in pairs if mine.event.kind == kind}
            for kind in ("weight", "reduced")
        )
        for mine, theirs in pairs:
            event, kind, apart = mine.event, mine.event.kind, distance(mine.values, theirs.values)
            own = max(unit_of(mine.values.dtype), unit_of(theirs.values.dtype))
            unit = max(found.get(event, own) for found in units)
            computes = computes or kind not in ("random", "weight", "batch")
            if computes and wrong is not None:
                kind = "operator of backward" if wrong["backward"] else "operator"
                event = Event(kind, wrong["module"], f"{wrong['operator']} 0")
                return _Parted(mine._replace(event=event), wrong["ratio"])
            if kind == "random" or (kind == "batch" and not computes):  # the script's own, not made by another model
                if apart.error > _FREE * own * apart.size:
                    return _Parted(mine, apart.ratio(own or 1.0))
            elif kind in BEFORE:
                carried = max(carried, apart.ratio(unit)) if kind == "weight" else carried
                moves = moved(mine, self._before[0]), moved(theirs, self._before[1])
                if moves[0] is not None and moves[1] is not None:
                    by = distance(moves[0], moves[1])
                    # If the script itself changes weights between steps, it changes other weights otherwise.
                    if by.error > _FREE * own * apart.size * (carried if bool(moves[0].any()) else 1.0):
                        return _Parted(mine, by.error / (own * apart.size or 1.0))
                elif not self._before[0] and apart.ratio(unit) > _FREE:
                    return _Parted(mine, apart.ratio(unit))
            elif kind == "reduced" and self._odd(number).get(event) == self._rank:
                return _Parted(mine, apart.ratio(unit))
            elif self._is_hidden:
                continue
            elif own == 0:
                if apart.error > 0:
                    return _Parted(mine, apart.ratio(1.0))
            elif kind == "parameter":
                place = event.module, event.item
                if place not in noisy:
                    ratio = _update((mine, theirs), entered.get(place), reduced.get(place), unit)
                    if ratio is not None:
                        return _Parted(mine, ratio)
            elif kind != "state" or (event.module, event.item.rpartition(" of ")[2]) not in noisy:
                backward = PHASE_OF[kind] in ("backward", "collective", "update")
                ratio = apart.ratio(unit, scales.get((kind, event.module), 0.0))
                if ratio > (_FREE_BACKWARD if backward else _FREE) * carried:
                    return _Parted(mine, ratio, apart.masks)
                if kind in ("gradient", "reduced") and apart.error > max(1e-3, 8 * unit) * apart.size:
                    noisy.add((event.module, event.item))
                carried = max(carried, ratio / 16 if backward else ratio)
        return None


def _exactly(pairs: Sequence[tuple[Seen, Seen]]) -> _Parted | None:
    for mine, theirs in pairs:
        apart = distance(mine.values, theirs.values)
        if not apart.equal:
            return _Parted(mine, apart.ratio(unit_of(mine.values.dtype) or 1.0), apart.masks)
    return None


def _operators(events: Iterable[Event]) -> dict[tuple[str, str], list[Event]]:
    """Return the operators of each module, of forward and of backward, in the order of the calls."""
    found: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind.startswith("operator"):
            found.setdefault(event[:2], []).append(event)
    return found


def _unchanged(other: Seen | None, before: Mapping[Event, Tensor]) -> Seen | None:
    """Return the state with which a step began in a run that did not see it again; None if it was never seen."""
    values = None if other is None else before.get(other.event._replace(kind="state"))
    return None if other is None or values is None else other._replace(values=values)


def _compiled_unit(settings: Mapping[str, str]) -> float:
    """Return the rounding of the coarsest dtype within compiled code."""
    autocast = settings.get("autocast", "off").split(", ") if settings.get("compiled") == "True" else []
    return max(unit_of(getattr(torch, dtype)) for dtype in ("float32", *autocast) if dtype != "off")


def _units(step: Step, coarsest: float) -> dict[Event, float]:
    """Return for each event the rounding of the coarsest dtype so far in the step."""
    units = accumulate((unit_of(seen.values.dtype) for seen in step.seen), max, initial=coarsest)
    return dict(zip((seen.event for seen in step.seen), list(units)[1:], strict=True))


def _update(
    both: tuple[Seen, Seen], entered: tuple[Seen, Seen] | None, reduced: tuple[Seen, Seen] | None, unit: float
) -> float | None:
    """Return how far two updates are apart, where the gradients of both runs are alike; None if that is explained.

    An adaptive optimizer makes a whole update of a gradient that is nothing but rounding.
    """
    if entered is None:
        return None
    mine, share = both[0], max(_SHARE, 64 * unit)
    moves = [after.values.double() - first.values.double() for after, first in zip(both, entered, strict=True)]
    if reduced is not None and all(seen.values.shape == mine.values.shape for seen in reduced):
        one, other = (seen.values.double() for seen in reduced)
        alike = (one - other).abs() <= share / 2 * torch.maximum(one.abs(), other.abs())
        moves = [move[alike] for move in moves]
    apart = distance(*moves)
    floor = unit * size_of(mine.values)
    if apart.error > share * apart.size + _FREE_UPDATE * floor:
        return apart.error / (floor or unit)
    return None


def _scales(pairs: Sequence[tuple[Seen, Seen]]) -> dict[tuple[str, str], float]:
    """Return the size of the largest gradient in each module: that of a bias may be nothing but rounding."""
    found: dict[tuple[str, str], float] = {}
    for mine, _ in pairs:
        if mine.event.kind in ("gradient", "reduced"):
            key = (mine.event.kind, mine.event.module)
            found[key] = max(found.get(key, 0.0), size_of(mine.values))
    return found


def _hides(pairs: Sequence[tuple[Seen, Seen]]) -> bool:
    apart = [distance(mine.values, theirs.values) for mine, theirs in pairs if mine.event.kind == "parameter"]
    return any(each.error > _HIDDEN * each.size for each in apart)


def _result(parted: _Parted, *, exact: bool) -> Result:
    (kind, module, item, _), phase = parted.seen.event, PHASE_OF[parted.seen.event.kind]
    module = parted.seen.source if kind in ("input", "grad") else module
    operator = item.rpartition(" ")[0].removesuffix(".default") if kind.startswith("operator") else None
    if parted.masks and kind in ("operator", "output"):
        phase = "random"
    return Result(
        agrees=False, steps=0, exact=exact, phase=phase,
        module=None if kind in ("random", "loss", "norm", "batch") else module,
        item=None if operator else f"{kind} {item}",
        operator=operator, ratio=parted.ratio,
    )  # fmt: skip


def _with_operator(result: Result, both: tuple[Step, Step], checked: Sequence[Mapping[str, Any]]) -> Result:
    """Add the operator: one that is wrong here, also if only one run has it, not one that carries a difference on."""
    if result.phase not in ("forward", "backward") or result.module is None:
        return result
    backward = result.phase == "backward"
    here = [each for each in checked if each["backward"] == backward]
    wrong = {
        each["operator"].removesuffix(".default"): each["ratio"]
        for each in here if each["is_wrong"] and each["module"] == result.module
    }  # fmt: skip
    if result.operator in wrong:
        return replace(result, is_cause=True)
    if wrong:
        worst = max(wrong, key=lambda operator: float(wrong[operator]))
        return replace(result, operator=worst, ratio=wrong[worst], is_cause=True)
    if result.operator is not None:
        return result
    kind = "operator of backward" if backward else "operator"
    mine, theirs = ([seen.event for seen in step.seen if seen.event.kind == kind] for step in both)
    if mine and theirs:
        alone = [event for event in (*theirs, *mine) if (event in theirs) != (event in mine)]
        names = [event.item.rpartition(" ")[0] for event in alone if event.module == result.module]
        if names:
            return replace(result, operator=names[0])
    if here and not any(each["is_wrong"] for each in here):
        note = "each operator of this step is right here for its own inputs: look at the recording's side, too"
        return replace(result, notes=(note,))
    return result


def _next(result: Result) -> str:
    """Return what to look at next."""
    if result.operator is not None:
        return f"run {result.operator} alone on both devices with the inputs of this step"
    operators = f"record and replay with operators=[{result.step}], which names the operator"
    return {
        "batch": "compare the order of the data: the sampler, its seed, and augmentation in the loader",
        "weights": "compare how this module is initialised, or what changes it between two steps",
        "random": "compare the seeds; for two kinds of devices, record with random='everywhere'",
        "collective": "compare what each rank contributes, and whether every rank takes part",
        "update": "compare the optimizer's settings and state, the learning rate and the loss scale",
    }.get(result.phase or "", operators)
