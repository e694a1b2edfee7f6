"""What `select()` would choose with the present environment, found without creating a backend, and so without torch."""

from __future__ import annotations

from dataclasses import dataclass

from accelcore.choices import parse
from accelcore.environment import requested_device
from accelcore.errors import AccelError
from accelcore.selection import decide

__all__ = ["Fault", "PassedOver", "SelectionPreview", "asked", "preview_selection"]


@dataclass(frozen=True)
class PassedOver:
    """A device that a list or `auto` could not use before the one it chose."""

    name: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Fault:
    """The error that `select()` would raise.

    Attributes:
        type: the exception's class; empty where no exception would come: the process would end, or be blocked.
    """

    type: str
    what: str
    why: str
    available: str
    remedy: str


@dataclass(frozen=True)
class SelectionPreview:
    """What `select()` would do.

    Attributes:
        request: the text of the request, `"auto"` where ACCEL_DEVICE is not set.
        source: where it comes from: `"ACCEL_DEVICE"` or `"default"`.
        chosen: the device, `"cpu:0"`; None where there would be an error.
        why: why that one.
        passed_over: what could not be used before it.
        error: what would happen instead.
    """

    request: str
    source: str
    chosen: str | None = None
    why: str = ""
    passed_over: tuple[PassedOver, ...] = ()
    error: Fault | None = None


def asked() -> tuple[str, str]:
    """The request of the present environment, and where it comes from."""
    text = requested_device()
    return ("auto", "default") if text is None else (text, "ACCEL_DEVICE")


def preview_selection() -> SelectionPreview:
    """Follow `select()` up to where it would create a backend."""
    request, source = asked()
    try:
        chosen, passed_over = decide(request, "ACCEL_DEVICE", str)
    except AccelError as error:
        fault = Fault(type(error).__name__, error.what, error.why, error.available, error.remedy)
        return SelectionPreview(request, source, error=fault)
    over = tuple(PassedOver(probe.name, probe.reason, probe.remedy) for probe in passed_over)
    choices = parse(request, "ACCEL_DEVICE")
    if choices is None:
        why = "the highest priority of the backends that work here"
    else:
        why = "the first of ACCEL_DEVICE that works here" if len(choices) > 1 else "ACCEL_DEVICE asks for it"
    return SelectionPreview(request, source, chosen, why, over)
