"""How far two values may be apart: units of rounding, and what the steps before explain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Distance", "distance", "unit_of"]

_SHORT = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


@dataclass(frozen=True)
class Distance:
    """How far two samples are apart.

    Attributes:
        equal: whether all bits are the same.
        error: root mean square of the difference.
        size: root mean square of the recorded sample.
        masks: whether the difference is that other elements are zero, as after another dropout.
    """

    equal: bool
    error: float
    size: float
    masks: bool

    def ratio(self, unit: float, scale: float = 0.0) -> float:
        """Return the error in units of rounding of the larger of `size` and `scale`."""
        if self.equal:
            return 0.0
        below = unit * max(self.size, scale)
        return self.error / below if below > 0 and math.isfinite(self.error) else math.inf


def distance(recorded: Tensor, replayed: Tensor) -> Distance:
    """Compare two samples. NaN equals NaN."""
    if recorded.shape != replayed.shape:
        return Distance(equal=False, error=math.inf, size=0.0, masks=False)
    a, b = recorded.double(), replayed.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Distance(equal=recorded.dtype == replayed.dtype, error=0.0, size=_rms(a), masks=False)
    difference = torch.where(same, 0.0, a - b)
    zeros, changed = (a == 0) != (b == 0), int((~same).sum())
    return Distance(equal=False, error=_rms(difference), size=_rms(a), masks=int(zeros.sum()) > changed // 2)


def unit_of(dtype: str) -> float:
    """Return the rounding of a dtype, named as `"float32"`, relative to its values; 0 for whole numbers."""
    return _SHORT.get(dtype, 0.0)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0
