"""GPUs of a machine, as its device files describe them before a driver is loaded."""

from __future__ import annotations

from dataclasses import dataclass

Fault = tuple[str, str]
"""Reason why a device cannot be used, and the remedy."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one vendor that this process may use.

    Attributes:
        words: description: `"2 NVIDIA GPUs, driver 580.65.06"`.
        count: number of GPUs.
        driver: version of the driver, or None if it cannot be read.
        fault: reason and remedy if there are none.
        notes: remarks that do not prevent use.
    """

    words: str = ""
    count: int = 0
    driver: str | None = None
    fault: Fault | None = None
    notes: tuple[str, ...] = ()
