"""Checks of hyperparameters, alike for all formulas."""

from __future__ import annotations

__all__ = ["fractions", "not_negative"]


def not_negative(**values: float) -> None:
    """Raise ValueError for a value below 0, or one that is not a number."""
    for name, value in values.items():
        if not value >= 0:  # true of nan, too
            raise ValueError(f"{name}={value} is out of range: it must be 0 or more")


def fractions(**values: float) -> None:
    """Raise ValueError for a value that is not at least 0 and below 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} is out of range: it must be at least 0 and below 1")
