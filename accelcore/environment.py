"""Environment variables, read strictly: an invalid value is an error that names the variable.

A variable of accelcore's own (`ACCEL_...`) or a launcher's that is empty counts as unset: a shell, a compose file or a
manifest has no other way to say so.
"""

from __future__ import annotations

import os
import re

from accelcore.errors import ConfigurationError

__all__ = ["probe_timeout", "requested_device", "shown"]


def requested_device() -> str | None:
    """The request in ACCEL_DEVICE, as written; None where it is unset or empty."""
    return os.environ.get("ACCEL_DEVICE") or None


def probe_timeout() -> float:
    """Seconds a plugin may take to load and answer its probe: ACCEL_PROBE_TIMEOUT, 5 by default."""
    text = os.environ.get("ACCEL_PROBE_TIMEOUT") or "5"
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text, re.ASCII) or float(text) == 0:
        raise ConfigurationError(
            f"ACCEL_PROBE_TIMEOUT={shown(text)} is not a number of seconds above 0",
            remedy="set it to a number such as 5 or 0.5, or unset it",
        )
    return float(text)


def shown(text: str, limit: int = 60) -> str:
    """Quote a value for a message: printable whatever it holds, and short."""
    return ascii(text) if len(text) <= limit else f"{text[:limit]!a}... ({len(text)} characters)"
