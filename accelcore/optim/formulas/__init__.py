"""Formulas: one file for each optimizer, the reference of all routes to it."""

from __future__ import annotations

from accelcore.optim.formulas.adam import Adam
from accelcore.optim.formulas.adamw import AdamW
from accelcore.optim.formulas.formula import Formula
from accelcore.optim.formulas.lamb import Lamb

__all__ = ["FORMULAS", "Formula"]

FORMULAS: dict[str, type[Formula]] = {"adam": Adam, "adamw": AdamW, "lamb": Lamb}
"""By the registry's name."""
