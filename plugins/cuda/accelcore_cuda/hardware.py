"""What device files say of the GPUs of a machine, before any driver is loaded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault", "Hardware"]

Fault = tuple[str, str]
"""Why something does not work, and what to do."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one vendor that this process may use.

    Attributes:
        words: what they are, for people: `"2 NVIDIA GPUs, driver 580.65.06"`.
        count: how many.
        driver: the driver's version, where it can be read.
        fault: why there are none.
        notes: what is worth knowing and stops nothing.
    """

    words: str = ""
    count: int = 0
    driver: str | None = None
    fault: Fault | None = None
    notes: tuple[str, ...] = ()
