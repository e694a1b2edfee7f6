"""Formulas: one file for each optimizer and its relatives, the reference of all routes to it. Kernels are elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from accelcore.optim.formulas.adamp import AdamP
from accelcore.optim.formulas.bertadam import BertAdam
from accelcore.optim.formulas.formula import FlatFormula, Formula, FusibleFormula
from accelcore.optim.formulas.lamb import Lamb
from accelcore.optim.formulas.rmsprop import Adadelta, RMSprop, RMSpropTF
from accelcore.optim.formulas.sgd_and_adam import SGD, Adam, AdamW

__all__ = ["FORMULAS", "Formula"]

FORMULAS: dict[str, type[Formula]] = {
    "adadelta": Adadelta,
    "adam": Adam,
    "adamp": AdamP,
    "adamw": AdamW,
    "bertadam": BertAdam,
    "lamb": Lamb,
    "rmsprop": RMSprop,
    "rmsproptf": RMSpropTF,
    "sgd": SGD,
}
"""By the registry's name."""

FLAT_FORMULAS: dict[str, Callable[..., FlatFormula]] = {
    name: type(f"Flat{kind.__name__}", (FlatFormula, kind), {})
    for name, kind in FORMULAS.items()
    if issubclass(kind, FusibleFormula)
}
"""The formulas that can be computed over flat memory, by the registry's name."""
