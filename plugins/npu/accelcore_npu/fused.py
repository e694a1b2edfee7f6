"""torch_npu's nine fused optimizers: options and state of the core's formulas, arithmetic over flat memory.

Six use torch_npu's arithmetic. AdamP, BertAdam and Lamb use the core's. torch_npu's AdamP and Lamb launch operators for
each parameter and wait for its norms; its BertAdam has the bugs that the class `BertAdam` of the core lists.
"""

from __future__ import annotations

from torch_npu import optim

from accelcore.optim.engine import Factory
from accelcore.optim.flat.formula import FLAT_FORMULAS
from accelcore.optim.formulas import FORMULAS, Formula
from accelcore_npu.flat import FusedFormula

__all__ = ["FUSED"]


def _fused(name: str, vendor: type, **attributes: object) -> type[Formula]:
    return type(vendor.__name__, (FusedFormula, FORMULAS[name]), {"vendor": vendor, **attributes})


FUSED: dict[str, Factory] = {
    "adadelta": _fused("adadelta", optim.NpuFusedAdadelta),
    "adam": _fused("adam", optim.NpuFusedAdam),
    "adamp": FLAT_FORMULAS["adamp"],
    "adamw": _fused("adamw", optim.NpuFusedAdamW),
    "bertadam": FLAT_FORMULAS["bertadam"],
    "lamb": FLAT_FORMULAS["lamb"],
    "rmsprop": _fused("rmsprop", optim.NpuFusedRMSprop),
    "rmsproptf": _fused("rmsproptf", optim.NpuFusedRMSpropTF),
    # Momentum starts as zeros, to which torch_npu adds as to any other.
    "sgd": _fused("sgd", optim.NpuFusedSGD, _momentum_buffer_already_in_state=True),
}
"""Factories of the optimizers that torch_npu fuses, by the registry's name."""
