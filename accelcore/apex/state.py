"""What `amp.initialize` leaves for the calls after it, in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelcore.apex.loss_scaling import AmpScaler
from accelcore.errors import AmpError

__all__ = ["State", "listed", "state"]


@dataclass
class State:
    """One for the process, as in apex. Scripts know it as `amp._amp_state`, and read its `loss_scalers`.

    Attributes:
        enabled: None before the first `initialize`.
        loss_scalers: one for each loss.
    """

    enabled: bool | None = None
    loss_scalers: list[AmpScaler] = field(default_factory=list)


state = State()


def listed(given: Any, kind: type, word: str) -> list[Any]:
    """What was given as one or as a list, as a list; AmpError where something else is in it."""
    if given is None:
        return []
    many = list(given) if isinstance(given, list | tuple) else [given]
    for each in many:
        if not isinstance(each, kind):
            raise AmpError(f"a {type(each).__name__} was given as {word}", remedy=f"give one {word}, or a list of them")
    return many
