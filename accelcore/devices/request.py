"""Requests in environment variables: ACCEL_DEVICE, with the grammar of `select()`; ACCEL_PROBE_TIMEOUT; ACCEL_TRIAL.

    request = "auto" | choice {"," choice}
    choice  = name [":" index]            name: a-z, then a-z 0-9 _;  index: no sign, no leading zero

ASCII only. Letter case and blanks around a choice are ignored. An empty variable counts as unset, because a shell or
a manifest has no other way to unset it; an invalid value raises.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from accelcore.errors import ConfigurationError, nearest
from accelcore.util.text import kind_of, shown

TRIAL = "ACCEL_TRIAL"  # a `TrialRequest` as JSON. Only `accelcore advise` sets it, for the processes of a trial.

_PREFIX = "ACCEL_"
_OWN = ("ACCEL_DEVICE", "ACCEL_PROBE_TIMEOUT", TRIAL)
_CHOICE = re.compile(r"([a-z][a-z0-9_]{0,31})(?::(0|[1-9][0-9]{0,3}))?")
_LONGEST = 256
_GRAMMAR = "NAME, NAME:INDEX, a list of these in order of preference (npu,cuda,cpu), or auto"


@dataclass(frozen=True)
class Choice:
    """A backend's name, and the device's index if the user gave one."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.index}"


def parse(text: str, source: str = "device") -> tuple[Choice, ...] | None:
    """Read a request; None means `auto`. Errors are ConfigurationErrors that name `source`."""
    if not isinstance(text, str):
        raise ConfigurationError(
            f"{source} is {kind_of(text)}, not a string", available=_GRAMMAR, remedy='give a string, such as "npu,cpu"'
        )
    request = ",".join(part.strip(" \t") for part in text.lower().split(",")) if text.isascii() else text
    if fault := _fault(request):
        raise ConfigurationError(
            f"{source}={shown(text)} is not a device",
            why=fault,
            available=_GRAMMAR,
            remedy=f"correct {source}" + (", or unset it" if source == "ACCEL_DEVICE" else ""),
        )
    if request == "auto":
        return None
    matches = [_CHOICE.fullmatch(part) for part in request.split(",")]
    return tuple(Choice(match[1], None if match[2] is None else int(match[2])) for match in matches if match)


def _fault(request: str) -> str:
    if len(request) > _LONGEST:
        return f"it has more than {_LONGEST} characters"
    parts = request.split(",")
    for part in parts:
        if not _CHOICE.fullmatch(part):
            return f"{shown(part)} is neither NAME nor NAME:INDEX"
        if part.split(":")[0] == "auto" and request != "auto":
            return "auto stands alone: it takes no index and cannot be in a list"
    return "it names a device twice" if len(set(parts)) < len(parts) else ""


def requested_device() -> str | None:
    """Return the text of ACCEL_DEVICE; None if it is unset or empty."""
    return os.environ.get("ACCEL_DEVICE") or None


def unread_variables(known: Iterable[str]) -> dict[str, str | None]:
    """Return the set variables that begin as accelcore's and are unknown, each with the most similar known one."""
    ends = [name.removeprefix(_PREFIX) for name in (*_OWN, *known) if name.startswith(_PREFIX)]
    set_ = [name for name in sorted(os.environ) if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in ends]
    near = {name: nearest(name.removeprefix(_PREFIX), ends) for name in set_}
    return {name: None if end is None else _PREFIX + end for name, end in near.items()}


def probe_timeout() -> float:
    """Return how many seconds a plugin may take to load and answer: ACCEL_PROBE_TIMEOUT, 5 by default."""
    text = os.environ.get("ACCEL_PROBE_TIMEOUT") or "5"
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text, re.ASCII) or float(text) == 0:
        raise ConfigurationError(
            f"ACCEL_PROBE_TIMEOUT={shown(text)} is not a number of seconds above 0",
            remedy="set it to a number such as 5 or 0.5, or unset it",
        )
    return float(text)


@dataclass(frozen=True)
class TrialRequest:
    """Request of `accelcore advise` to train for some steps with other options, and to record what happens."""

    report: str  # file that the record is appended to, as lines of JSON
    steps: int  # number of windows after which the script ends
    seed: int = 0  # added to each seed of the script; 0 leaves the random numbers as they are
    # the trainer's options to override: `precision`, such as `"bf16"` or `"O2 bfloat16"`; `fp32`; `compile`; `flat`
    options: Mapping[str, Any] = field(default_factory=dict)


def requested_trial() -> TrialRequest | None:
    """Return the trial that ACCEL_TRIAL requests; None if it is unset or empty."""
    return _trial(os.environ.get(TRIAL, ""))


@cache
def _trial(text: str) -> TrialRequest | None:
    return TrialRequest(**json.loads(text)) if text else None
