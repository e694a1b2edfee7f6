"""Compare two recordings: the `Result` names the first event that diverges, in the order of the recording."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.checkpoint.folders import as_path
from accelcore.errors import RecordingError
from accelcore.layerwise import unit_of
from accelcore.parity.events import PHASE_OF, Event, Seen
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.settings import Difference, arithmetic, differences, of_training
from accelcore.parity.tolerance import (
    BEFORE,
    WITHOUT_TOLERANCE,
    Both,
    Pairs,
    Parted,
    Tolerance,
    begins_at,
    first_unequal,
    hides,
    odd_ranks,
)

_AT_THE_END = frozenset(kind for kinds in BEFORE.values() for kind in kinds)
_LOSS_SCALE = re.compile(r"trainer (parallel|precision|loss_scale)|autocast")
_SCALED_BY = {
    "grad": _LOSS_SCALE,
    "gradient": _LOSS_SCALE,
    "operator of backward": _LOSS_SCALE,
    "reduced": re.compile(r"trainer (flat|precision)|optimizer \d+ route"),  # some kernels unscale and clip
}
"""Settings under which two runs may scale gradients by other factors, by the kind of event."""
_SAME_IN_EVERY_JOB = ("weight", "learning rate", "reduced", "norm", "old state", "state", "parameter", "buffer")
"""Kinds of events that do not depend on how a batch is divided among ranks."""
_DRAWS = re.compile(r"drop|rrelu|fractional|attention|transformer|rnn|lstm|gru", re.IGNORECASE)
"""Names of torch's modules that can draw random numbers."""


@dataclass(frozen=True)
class Result:
    """Whether a replay agrees with its recording, and the first place where they diverge.

    Attributes:
        agrees: whether every event that was compared is the same, up to the rounding that is expected, and no setting
            differs of what is trained, such as the weight decay.
        steps: how many steps were compared.
        exact: whether equal bits were asked for: both runs had the same device, versions and settings of arithmetic,
            and the replay took no other batches.
        step: the first that differs, counted from 1; None if they agree.
        rank: the first that differs in this step, counted from 0; None if they agree.
        phase: `"batch"`, `"weights"`, `"random"`, `"forward"`, `"backward"`, `"collective"` or `"update"`;
            `"settings"` if all events agree, and a setting of what is trained differs; `"batch size"` of
            `Replay(..., batch=)`; None if they agree.
        module: the module's name as in `model.named_modules()`, `""` for the model itself; None if there is none.
        item: the parameter, the buffer, the number of the input or output, or the state of the optimizer.
        operator: the operator, such as `"aten::addmm"`, if operators were recorded in this step or checked.
        is_cause: True if the difference begins here: the operator is wrong for its own inputs, compared with float64 on
            the host, or everything that the item was computed from was seen and agreed. None if that is not known, as
            for a loss, or behind modules that a compiler hides: the difference was only first seen here.
        ratio: the size of the difference in units of the expected rounding; infinite for whole numbers, which are not
            rounded.
        next: what to look at next, in a sentence.
        settings: settings that differ. Another device, version, precision, strategy or kernel is not an error: it
            changes how the training is computed, not what is trained.
        notes: what else to know, such as from which step on rounding hides differences.
    """

    agrees: bool
    steps: int
    exact: bool
    step: int | None = None
    rank: int | None = None
    phase: str | None = None
    module: str | None = None
    item: str | None = None
    operator: str | None = None
    is_cause: bool | None = None
    ratio: float = 0.0
    next: str = ""
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dict for JSON, which has no infinite numbers: None instead."""
        return {"schema": 1, **asdict(self), "ratio": self.ratio if math.isfinite(self.ratio) else None}

    @property
    def size(self) -> str:
        """The size of the difference, in words."""
        return f"{self.ratio:.3g} units of rounding" if math.isfinite(self.ratio) else "more than rounding"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The first difference as a table of names and texts."""
        names = ("step", "rank", "phase", "module", "item", "operator", "size")
        found = {name: getattr(self, name) for name in names}
        found |= {"begins here": "yes" if self.is_cause else "not known: it was first seen here", "next": self.next}
        return [(name, str(value) or "(the model itself)") for name, value in found.items() if value is not None]

    def __str__(self) -> str:
        if self.agrees:
            how = "to the bit" if self.exact else "up to rounding"
            return f"the runs agree {how} in {self.steps} step{'s' * (self.steps != 1)}"
        if self.phase == "settings":
            numbers = "have the same bits" if self.exact else "differ by no more than rounding"
            return f"two trainings, with other settings: {self.item}; {self.steps} of their steps {numbers}"
        where = f"step {self.step}, rank {self.rank}, {self.phase}" if self.step is not None else f"{self.phase}"
        module = "" if self.module is None else f", module {self.module or '(the model itself)'}"
        item = f", {self.item}" if self.item else ""
        operator = f", {self.operator}" if self.operator else ""
        kind = "the difference begins here" if self.is_cause else "first seen here"
        return f"the runs diverge at {where}{module}{item}{operator}: {self.size}, {kind}"


def compare(reference: Path | str, other: Path | str, *, rank: int | None = None) -> Result:
    """Compare two recordings, and return where they diverge first.

    Args:
        reference: the folder of the recording.
        other: the folder of the other one.
        rank: the rank to compare; None for all that both have.

    Raises:
        RecordingError: a folder has no recording, one is damaged, or they have no step or module in common.
    """
    folders, others = ranks_of(as_path(reference)), ranks_of(as_path(other))
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
    first = min(
        parted, key=lambda each: (each.step or math.inf, order.get(each.phase or "", 0), each.rank or 0), default=None
    )
    return results[0] if first is None else replace(first, next=first.next or _next(first))


class _Comparison:
    """The comparison of one rank; `everywhere`: whether all ranks of both runs are compared.

    `odd` returns the reduced gradients of a step that ranks do not share, and the rank with another one.
    """

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
        self._scaled = {kind for kind, settings in _SCALED_BY.items() if any(map(settings.search, changed))}
        self._exact = not arithmetic(self._settings) and not self._facts.get("took_batches")
        self._coarsest = max(_compiled_unit(each.facts["settings"]) for each in self._readers)
        self._notes = list(self._facts.get("notes", []))
        self._is_hidden = False  # whether rounding has grown so far that only what needs no tolerance is compared
        # What was seen last at the end of a step, in both runs.
        self._before: tuple[dict[Event, Tensor], dict[Event, Tensor]] = ({}, {})

    def result(self) -> Result:
        """Compare step by step, and return where the runs diverge."""
        if stored := self._facts.get("result"):  # of two sizes of a batch
            return Result(**stored)
        recorded, replayed = (len(reader.steps) for reader in self._readers)
        if not recorded or not replayed:
            raise RecordingError(
                "the two recordings have no step in common", remedy="let the replay run at least one step"
            )
        steps = min(recorded, replayed)
        found = None
        for number in range(1, steps + 1):
            both = self._readers[0].step(number), self._readers[1].step(number)
            pairs = self._pairs(both)
            found = self._difference(number, both, pairs)
            if found is not None:
                found = replace(found, steps=number, step=number, rank=self._rank)
                break
            self._remember(number, pairs)
        short = (f"the replay has {replayed} of {recorded} steps",) if replayed < recorded else ()
        if found is None:
            others = of_training(self._settings)
            found = Result(agrees=not others, steps=steps, exact=self._exact, notes=short)
            if others:
                found = replace(found, phase="settings", item=", ".join(others), is_cause=True)
        return replace(found, settings=self._settings, notes=(*self._notes, *found.notes))

    def _difference(self, number: int, both: Both, pairs: Pairs) -> Result | None:
        """Return the first difference of a step, and whether it begins there."""
        if number == 1 and (others := self._facts.get("other_weights")):
            module, _, item = others[0].rpartition(".")
            return Result(
                agrees=False, steps=0, exact=self._exact, phase="weights", module=module, item=f"weight {item}",
                is_cause=True, ratio=math.inf,
            )  # fmt: skip
        checked = [each for each in self._facts.get("checked", []) if each["step"] == number]
        if self._exact:
            parted = first_unequal(pairs)
        else:
            tolerance = Tolerance(
                both, pairs, coarsest=self._coarsest, before=self._before, is_hidden=self._is_hidden,
                scaled=self._scaled,
                odd={event for event, rank in self._odd(number).items() if rank == self._rank},
            )  # fmt: skip
            parted = tolerance.first(next((each for each in checked if each["is_certain"]), None))
        if parted is None:
            return None
        found = _result(parted, exact=self._exact, draws=self._can_draw(parted.seen.event.module))
        found = _with_operator(found, both, checked)
        before = self._before[0] if number > 1 else None
        compared = [mine.event for mine, _ in pairs]
        cause = found.is_cause or begins_at(parted.seen, both, compared, before=before, ranks=self._everywhere)
        return replace(found, is_cause=cause)

    def _can_draw(self, module: str) -> bool:
        """Return whether other zeros in a module's output can be other random numbers: it is the same, and can draw."""
        name, modules = _setting(module), self._facts["settings"]
        if any(each.name == name for each in self._settings):
            return False
        kind = modules.get(name, "").partition("(")[0]
        children = name + "." if module else "module "
        has_children = any(each.startswith(children) and each != name for each in modules)
        return has_children or not hasattr(nn, kind) or _DRAWS.search(kind) is not None

    def _remember(self, number: int, pairs: Pairs) -> None:
        """Keep what was seen at the end of a step until it is seen again: each optimizer has steps of its own."""
        for mine, theirs in pairs:
            if mine.event.kind in _AT_THE_END:
                self._before[0][mine.event], self._before[1][mine.event] = mine.values, theirs.values
        if not self._exact and not self._is_hidden and hides(pairs):
            self._is_hidden = True
            self._notes.append(f"after step {number} rounding hides differences: only {WITHOUT_TOLERANCE} are compared")

    def _pairs(self, both: Both) -> Pairs:
        """Return the events that both steps have, in the recording's order.

        If the runs may have divided a model otherwise, a tensor of another shape is a shard, and is skipped. So are
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
        if not pairs:
            raise RecordingError(
                f"step {both[0].number} of the two recordings has nothing in common",
                why="no module or parameter has the same name, or the ranks divide the batch in another way",
                remedy="replay the script that was recorded",
            )
        return pairs


def _operators(events: Iterable[Event]) -> dict[tuple[str, str], list[Event]]:
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


def _setting(module: str) -> str:
    return f"module {module or '(the model itself)'}"


def _result(parted: Parted, *, exact: bool, draws: bool) -> Result:
    (kind, module, item, _), phase = parted.seen.event, PHASE_OF[parted.seen.event.kind]
    module = parted.seen.source if kind in ("input", "grad") else module
    operator = item.rpartition(" ")[0].removesuffix(".default") if kind.startswith("operator") else None
    if parted.masks and draws and kind in ("operator", "output"):
        phase = "random"
    return Result(
        agrees=False, steps=0, exact=exact, phase=phase,
        module=None if kind in ("random", "loss", "norm", "batch", "learning rate") else module,
        item=None if operator else f"{kind} {item}",
        operator=operator, ratio=parted.ratio,
    )  # fmt: skip


def _with_operator(result: Result, both: Both, checked: Sequence[Mapping[str, Any]]) -> Result:
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
    other = [each for each in result.settings if result.module is not None and each.name == _setting(result.module)]
    if other and result.phase in ("forward", "backward"):
        return f"{other[0].name} is another module: {other[0].recorded} → {other[0].replayed}"
    if result.operator is not None:
        return f"run {result.operator} alone on both devices with the inputs of this step"
    operators = f"record and replay with operators=[{result.step}], which names the operator"
    return {
        "batch": "compare the order of the data: the sampler, its seed, and augmentation in the loader",
        "weights": "compare how this module is initialised, or what changes it between two steps",
        "random": "compare the seeds; for two kinds of devices, record --same-random, or random='everywhere'",
        "collective": "compare what each rank contributes, and what changes gradients before the update",
        "settings": "give both runs the same settings: numbers show no change of them that is less than rounding",
        "update": "compare the optimizer's settings and state, the learning rate and the loss scale",
    }.get(result.phase or "", operators)
