"""Compare two recordings: the first event that parts, in the order of the recording."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import RecordingError
from accelcore.parity.cause import begins_at, is_wrong_here
from accelcore.parity.events import PHASE_OF, Event, Seen, Step
from accelcore.parity.invariants import BEFORE, certainly_wrong, moved, odd_ranks
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.result import Result
from accelcore.parity.rounding import Distance, distance, unit_of
from accelcore.parity.settings import arithmetic, differences

__all__ = ["compare"]

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


@dataclass(frozen=True)
class _Parted:
    seen: Seen
    apart: Distance
    ratio: float


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
    results = [_of_rank(each, recorded[each], replayed[each], odd, everywhere=everywhere) for each in ranks]
    parted = [result for result in results if not result.agrees]
    return min(parted, key=lambda each: (each.step or 0, _order(each.phase), each.rank or 0)) if parted else results[0]


def _order(phase: str | None) -> int:
    order = list(dict.fromkeys(("settings", *PHASE_OF.values())))
    return order.index(phase) if phase in order else 0


def _of_rank(
    rank: int, recorded: Reader, replayed: Reader, odd: Callable[[int], Mapping[Event, int]], *, everywhere: bool
) -> Result:
    settings = differences(recorded.facts["settings"], replayed.facts["settings"])
    changed = {each.name for each in settings}
    kinds = _SAME_IN_EVERY_JOB if "ranks" in changed else tuple(PHASE_OF)
    divided = not changed.isdisjoint(("ranks", "trainer parallel"))
    exact = not arithmetic(settings) and not replayed.facts.get("took_batches")
    steps = sorted(set(recorded.steps) & set(replayed.steps))
    if not steps:
        raise RecordingError("the two recordings have no step in common", remedy="let the replay run one step at least")
    notes, checked = [str(note) for note in replayed.facts.get("notes", [])], replayed.facts.get("checked", [])
    before: tuple[dict[Event, Tensor], dict[Event, Tensor]] = ({}, {})  # what was seen last at the end of a step
    unit = max(_compiled_unit(each.facts["settings"]) for each in (recorded, replayed))
    hidden = False
    if len(replayed.steps) < len(recorded.steps):
        notes.append(f"the replay has {len(replayed.steps)} of {len(recorded.steps)} steps")
    for count, number in enumerate(steps, start=1):
        both = recorded.step(number), replayed.step(number)
        pairs = _pairs(both, before, kinds, divided=divided)
        if not pairs:
            raise RecordingError(
                f"step {number} of the two recordings has nothing in common",
                why="no module or parameter has the same name, or the ranks divide the batch otherwise",
                remedy="replay the script that was recorded",
            )
        if number == 1 and (others := replayed.facts.get("other_weights")):
            return _told(_other_weights(others, rank, exact=exact, settings=settings, notes=tuple(notes)))
        if exact:
            parted = _exactly(pairs)
        else:
            uneven = {event for event, each in odd(number).items() if each == rank}
            parted = _by_rounding(both, pairs, before, certainly_wrong(checked, number), uneven, unit, hidden=hidden)
        if parted is not None:
            found = _with_operator(_result(parted, number, rank, exact=exact), both, checked)
            cause = is_wrong_here(found, checked) or begins_at(
                parted.seen, both, [mine.event for mine, _ in pairs],
                before=before[0] if number > 1 else None, ranks=everywhere,
            )  # fmt: skip
            found = replace(found, is_cause=cause)
            return _told(replace(found, steps=count, settings=settings, notes=(*notes, *found.notes)))
        for mine, theirs in pairs:
            if mine.event.kind in _AT_THE_END:  # kept until it is seen again: each optimizer has steps of its own
                before[0][mine.event], before[1][mine.event] = mine.values, theirs.values
        if not exact and not hidden and _is_hidden(pairs):
            hidden = True
            notes.append(f"after step {number} rounding hides differences: only {_WITHOUT_TOLERANCE} are compared")
    return Result(agrees=True, steps=len(steps), exact=exact, settings=settings, notes=tuple(notes))


def _pairs(
    both: tuple[Step, Step],
    before: tuple[Mapping[Event, Tensor], Mapping[Event, Tensor]],
    kinds: Sequence[str],
    *,
    divided: bool,
) -> list[tuple[Seen, Seen]]:
    """Return the events of these kinds that both steps have, in the recording's order.

    If the runs may have `divided` a model otherwise, a tensor of another shape is a shard, and is left out. So are the
    calls of an operator that a module makes more often in one run: which call corresponds to which is not known.
    """
    seen = [{each.event: each for each in step.seen if each.event.kind in kinds} for step in both]
    calls = [Counter(_called(event) for event in events if event.kind.startswith("operator")) for events in seen]
    order = [event for event in seen[0] if event in seen[1] and event.kind != "old state"]
    updated = next((index for index, event in enumerate(order) if event.kind in ("state", "parameter")), len(order))
    order[updated:updated] = dict.fromkeys(event for events in seen for event in events if event.kind == "old state")
    pairs = []
    for event in order:
        mine, theirs = (events.get(event) for events in seen)
        mine, theirs = mine or _unchanged(theirs, before[0]), theirs or _unchanged(mine, before[1])
        if mine is None or theirs is None or (divided and mine.shape != theirs.shape):
            continue
        if calls[0][_called(event)] == calls[1][_called(event)]:
            pairs.append((mine, theirs))
    return pairs


def _unchanged(other: Seen | None, before: Mapping[Event, Tensor]) -> Seen | None:
    """Return the state with which a step began in a run that did not see it again; None if it was never seen."""
    values = None if other is None else before.get(other.event._replace(kind="state"))
    return None if other is None or values is None else replace(other, values=values)


def _called(event: Event) -> Event:
    return event._replace(number=0)


def _exactly(pairs: Sequence[tuple[Seen, Seen]]) -> _Parted | None:
    for mine, theirs in pairs:
        apart = distance(mine.values, theirs.values)
        if not apart.equal:
            return _Parted(mine, apart, apart.ratio(unit_of(mine.dtype) or 1.0))
    return None


def _by_rounding(
    both: tuple[Step, Step],
    pairs: Sequence[tuple[Seen, Seen]],
    before: tuple[Mapping[Event, Tensor], Mapping[Event, Tensor]],
    wrong: Mapping[str, Any] | None,
    odd: Container[Event],
    hidden_unit: float,
    *,
    hidden: bool,
) -> _Parted | None:
    """Return the first event that is further apart than what it was computed from explains.

    Args:
        wrong: an operator of this step that is certainly wrong.
        odd: reduced gradients that the other ranks do not have.
        hidden_unit: rounding of the coarsest dtype within compiled code, where it is not seen.
        hidden: whether rounding has grown so far that only what needs no tolerance is compared.
    """
    carried, computes, scales = 1.0, False, _scales(pairs)
    units = [_units(step, hidden_unit) for step in both]
    noisy: set[tuple[str, str]] = set()
    entered, reduced = (
        {(mine.event.module, mine.event.item): (mine, theirs) for mine, theirs in pairs if mine.event.kind == kind}
        for kind in ("weight", "reduced")
    )
    for mine, theirs in pairs:
        event, kind, apart = mine.event, mine.event.kind, distance(mine.values, theirs.values)
        own = max(unit_of(mine.dtype), unit_of(theirs.dtype))
        unit = max(found.get(event, own) for found in units)
        computes = computes or kind not in ("random", "weight", "batch")
        if computes and wrong is not None:
            return _operator(wrong)
        if kind == "random" or (kind == "batch" and not computes):  # the script's own, not made by another model
            if apart.error > _FREE * own * apart.size:
                return _Parted(mine, apart, apart.ratio(own or 1.0))
        elif kind in BEFORE:
            carried = max(carried, apart.ratio(unit)) if kind == "weight" else carried
            moves = moved(mine, before[0]), moved(theirs, before[1])
            if moves[0] is not None and moves[1] is not None:
                by = distance(moves[0], moves[1])
                # If the script itself changes weights between steps, it changes other weights otherwise.
                free = _FREE * own * apart.size * (carried if bool(moves[0].any()) else 1.0)
                if by.error > free:
                    return _Parted(mine, by, by.error / (own * apart.size or 1.0))
            elif not before[0] and apart.ratio(unit) > _FREE:
                return _Parted(mine, apart, apart.ratio(unit))
        elif event in odd:
            return _Parted(mine, apart, apart.ratio(unit))
        elif hidden:
            continue
        elif own == 0:
            if apart.error > 0:
                return _Parted(mine, apart, apart.ratio(1.0))
        elif kind == "parameter":
            place = event.module, event.item
            parted = None if place in noisy else _update((mine, theirs), entered.get(place), reduced.get(place), unit)
            if parted is not None:
                return parted
        elif kind != "state" or (event.module, event.item.rpartition(" of ")[2]) not in noisy:
            backward = PHASE_OF[kind] in ("backward", "collective", "update")
            ratio = apart.ratio(unit, scales.get((kind, event.module), 0.0))
            if ratio > (_FREE_BACKWARD if backward else _FREE) * carried:
                return _Parted(mine, apart, ratio)
            if kind in ("gradient", "reduced") and apart.error > max(1e-3, 8 * unit) * apart.size:
                noisy.add((event.module, event.item))
            carried = max(carried, ratio / 16 if backward else ratio)
    return None


def _compiled_unit(settings: Mapping[str, str]) -> float:
    autocast = settings.get("autocast", "off") if settings.get("compiled") == "True" else "off"
    return max(unit_of(dtype) for dtype in ("float32", *autocast.split(", ")))


def _units(step: Step, coarsest: float) -> dict[Event, float]:
    """Return for each event the rounding of the coarsest dtype so far in the step."""
    units = accumulate((unit_of(seen.dtype) for seen in step.seen), max, initial=coarsest)
    return dict(zip((seen.event for seen in step.seen), list(units)[1:], strict=True))


def _operator(wrong: Mapping[str, Any]) -> _Parted:
    """Return an operator that is wrong for its own inputs as where the runs part."""
    event = Event(
        "operator of backward" if wrong["backward"] else "operator", wrong["module"], f"{wrong['operator']} 0"
    )
    nothing = torch.zeros(0)
    return _Parted(Seen(event, "float32", (), "", nothing), distance(nothing, nothing), wrong["ratio"])


def _update(
    both: tuple[Seen, Seen], entered: tuple[Seen, Seen] | None, reduced: tuple[Seen, Seen] | None, unit: float
) -> _Parted | None:
    """Compare how far an update has moved a parameter, where the gradients of both runs are alike.

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
    floor = unit * distance(mine.values, mine.values).size
    if apart.error > share * apart.size + _FREE_UPDATE * floor:
        return _Parted(mine, apart, apart.error / (floor or unit))
    return None


def _scales(pairs: Sequence[tuple[Seen, Seen]]) -> dict[tuple[str, str], float]:
    """Return the size of the largest gradient in each module: that of a bias may be nothing but rounding."""
    found: dict[tuple[str, str], float] = {}
    for mine, _ in pairs:
        kind = mine.event.kind
        if kind in ("gradient", "reduced"):
            key = (kind, mine.event.module)
            found[key] = max(found.get(key, 0.0), distance(mine.values, mine.values).size)
    return found


def _is_hidden(pairs: Sequence[tuple[Seen, Seen]]) -> bool:
    apart = [distance(mine.values, theirs.values) for mine, theirs in pairs if mine.event.kind == "parameter"]
    return any(each.error > _HIDDEN * each.size for each in apart)


def _result(parted: _Parted, step: int, rank: int, *, exact: bool) -> Result:
    event, source = parted.seen.event, parted.seen.source
    phase = PHASE_OF[event.kind]
    module = source if event.kind in ("input", "grad") else event.module
    operator = None
    if event.kind.startswith("operator"):
        operator = _plain(event.item.rpartition(" ")[0])
        if parted.apart.masks and phase == "forward":
            phase = "random"
    elif event.kind == "output" and parted.apart.masks:
        phase = "random"
    return Result(
        agrees=False, steps=0, exact=exact, step=step, rank=rank, phase=phase,
        module=None if event.kind in ("random", "loss", "norm", "batch") else module,
        item=None if operator else f"{event.kind} {event.item}",
        operator=operator, ratio=parted.ratio,
    )  # fmt: skip


def _plain(operator: str) -> str:
    return operator.removesuffix(".default")


def _with_operator(result: Result, both: tuple[Step, Step], checked: Sequence[Mapping[str, Any]]) -> Result:
    """Add the operator: one that is wrong here, also if only one run has it, not one that carries a difference on."""
    if result.phase not in ("forward", "backward") or result.module is None:
        return result
    backward = result.phase == "backward"
    here = [each for each in checked if each["step"] == result.step and each["backward"] == backward]
    wrong = [each for each in here if each["is_wrong"] and each["module"] == result.module]
    if wrong and result.operator not in [_plain(each["operator"]) for each in wrong]:
        worst = max(wrong, key=lambda each: float(each["ratio"]))
        return replace(result, operator=_plain(worst["operator"]), ratio=float(worst["ratio"]))
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
        return replace(result, notes=(*result.notes, note))
    return result


def _other_weights(names: Sequence[str], rank: int, *, exact: bool, **more: Any) -> Result:
    """Return the result if the replay would have begun with other weights."""
    module, _, item = names[0].rpartition(".")
    return Result(
        agrees=False, steps=1, exact=exact, step=1, rank=rank, phase="weights", module=module, item=f"weight {item}",
        is_cause=True, ratio=math.inf, **more,
    )  # fmt: skip


def _told(result: Result) -> Result:
    """Add what to look at next."""
    advice = {
        "batch": "compare the order of the data: the sampler, its seed, and augmentation in the loader",
        "weights": "compare how this module is initialised, or what changes it between two steps",
        "random": "compare the seeds; for two kinds of devices, record with random='everywhere'",
        "forward": f"record and replay with operators=[{result.step}], which names the operator",
        "backward": f"record and replay with operators=[{result.step}], which names the operator",
        "collective": "compare what each rank contributes, and whether every rank takes part",
        "update": "compare the optimizer's settings and state, the learning rate and the loss scale",
    }
    if result.operator is not None:
        return replace(result, next=f"run {result.operator} alone on both devices with the inputs of this step")
    return replace(result, next=advice[result.phase or "forward"])
