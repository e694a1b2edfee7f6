"""Whether a difference begins where it was seen first: all that the item was computed from was seen, and agreed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from accelcore.parity.events import Event, Seen, Step
from accelcore.parity.invariants import BEFORE
from accelcore.parity.result import Result

__all__ = ["begins_at", "is_wrong_here"]

_FORWARD = ("batch", "input", "output")
_OPERATORS = (*_FORWARD, "operator", "operator of backward", "grad")


def begins_at(
    parted: Seen, both: tuple[Step, Step], compared: Sequence[Event], *, before: Container[Event] | None, ranks: bool
) -> bool | None:
    """Return True if all that an event was computed from is among the events that agree; None if that is not known.

    A batch, initial weights and random numbers come from outside the training: a difference of them begins there. A
    loss or a norm was computed from more than was seen, such as the targets.

    Args:
        parted: the first event that differs.
        both: the step in both recordings.
        compared: the events of this step that were compared, in order.
        before: the events of the step before that were compared; None in the first step.
        ranks: whether the other ranks were compared, too; there may be none.
    """
    event = parted.event
    agreed = set(compared[: compared.index(event)])
    kinds = {(each.kind, each.module, each.item) for each in agreed}
    modules = {(each.kind, each.module) for each in agreed}
    if event.kind == "random":
        known = True
    elif event.kind == "batch":
        known = not any(each.kind == "output" for each in agreed)  # another model may have made it
    elif event.kind in BEFORE:
        known = before is None or any(event._replace(kind=kind) in before for kind in BEFORE[event.kind])
    elif event.kind in ("input", "output"):
        known = not _alone(event, both, _FORWARD)
    elif event.kind == "buffer":
        known = ("output", event.module) in modules
    elif event.kind in ("operator", "operator of backward"):
        # Those outside all modules read what was not seen, such as targets.
        known = bool(event.module) and not _alone(event, both, _OPERATORS)
    elif event.kind == "grad":
        known = parted.source != event.module and ("grad", parted.source) in modules
    elif event.kind == "gradient":
        known = ("grad", event.module) in modules
    elif event.kind == "reduced":
        known = ranks and ("gradient", event.module, event.item) in kinds
    elif event.kind in ("state", "parameter"):
        name = event.item.rpartition(" of ")[2]
        known = {("reduced", event.module, name), ("weight", event.module, name)} <= kinds
    else:
        known = False
    return known or None


def is_wrong_here(result: Result, checked: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the operator of a result is wrong here for its own inputs, compared with float64 on the host."""
    place = (result.operator, result.module, result.step)
    return any(
        each["is_wrong"] and (each["operator"].removesuffix(".default"), each["module"], each["step"]) == place
        for each in checked
    )


def _alone(event: Event, both: tuple[Step, Step], kinds: Sequence[str]) -> bool:
    """Return whether one run saw something before this event that the other did not see."""
    seen = [[each.event for each in step.seen] for step in both]
    everywhere = set(seen[0]) & set(seen[1])
    return any(
        each.kind in kinds and each not in everywhere for events in seen for each in events[: events.index(event)]
    )
