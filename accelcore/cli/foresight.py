"""What `select()` would choose with the present environment, found without creating a backend, and so without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from accelcore import selection
from accelcore.environment import Launch, read_launch, shown
from accelcore.errors import AccelError
from accelcore.plugins import Candidate
from accelcore.selection import Choice

__all__ = ["Fault", "Foresight", "PassedOver", "foresee"]


@dataclass(frozen=True)
class PassedOver:
    """A device that a list or `auto` could not use before the one it chose."""

    name: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Fault:
    """The error that `select()` would raise."""

    type: str
    what: str
    why: str
    available: str
    remedy: str


@dataclass(frozen=True)
class Foresight:
    """What `select()` would do.

    Attributes:
        request: the text of the request, `"auto"` where ACCEL_DEVICE is not set.
        source: where it comes from: `"ACCEL_DEVICE"` or `"default"`.
        chosen: the device, `"cpu:0"`; None where `select()` would raise.
        why: why that one.
        passed_over: what could not be used before it.
        error: what would be raised instead.
    """

    request: str
    source: str
    chosen: str | None = None
    why: str = ""
    passed_over: tuple[PassedOver, ...] = ()
    error: Fault | None = None


def foresee(candidates: Sequence[Candidate]) -> Foresight:
    """Follow `select()` up to where it would create a backend, among these candidates."""
    text = os.environ.get("ACCEL_DEVICE")
    request, source = ("auto", "default") if text is None else (text, "ACCEL_DEVICE")
    try:
        chosen, why, passed_over = _follow(request, candidates)
    except AccelError as error:
        fault = Fault(type(error).__name__, error.what, error.why, error.available, error.remedy)
        return Foresight(request, source, error=fault)
    return Foresight(request, source, chosen, why, passed_over)


def _follow(text: str, candidates: Sequence[Candidate]) -> tuple[str, str, tuple[PassedOver, ...]]:
    choices = selection.parse(text, "ACCEL_DEVICE")
    launch = read_launch()
    if choices is None:
        ranking = sorted(candidates, key=lambda candidate: (-candidate.probe.priority, candidate.name))
        wishes: list[tuple[Choice, Candidate | None]] = [(Choice(candidate.name), candidate) for candidate in ranking]
        request, why = "auto", "the highest priority of the backends that work here"
    else:
        by_name = {candidate.name: candidate for candidate in candidates}
        wishes = [(choice, by_name.get(choice.name)) for choice in choices]
        request, why = f"ACCEL_DEVICE={shown(text)}", "the first of ACCEL_DEVICE that works here"
    usable = ", ".join(candidate.name for candidate in candidates if candidate.probe.available)
    if choices is not None and len(choices) == 1:
        choice, candidate = wishes[0]
        return _admitted(choice, candidate, launch, request, usable), "ACCEL_DEVICE orders it", ()
    passed_over: list[PassedOver] = []
    for choice, candidate in wishes:
        if candidate is not None and candidate.probe.available and choice.index is None:
            return _admitted(choice, candidate, launch, request, usable), why, tuple(passed_over)
        try:
            return _admitted(choice, candidate, launch, str(choice), usable), why, tuple(passed_over)
        except AccelError as error:
            passed_over.append(PassedOver(str(choice), error.why or error.what, error.remedy or _whole(choice)))
    selection._first_that_works(wishes, launch, request)  # none can be created: it raises what select() would
    raise AssertionError("select() found a backend where none is usable")


def _whole(choice: Choice) -> str:
    return f"ask for {choice} alone to see the whole error"


def _admitted(choice: Choice, candidate: Candidate | None, launch: Launch | None, request: str, usable: str) -> str:
    """The device that would be created; where none would, the error of `select()`, by its own code."""
    if candidate is None or not candidate.probe.available:
        selection._create(choice, candidate, launch, request, lambda: usable or "no usable backend is installed")
        raise AssertionError("select() created a backend that is not available")
    return f"{choice.name}:{selection._index(choice, candidate.probe, launch, request)}"
