"""Distance of two samples, in units of rounding."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Distance(NamedTuple):
    """Distance of two samples."""

    equal: bool  # whether all bits are the same
    error: float  # root mean square of the difference
    size: float  # root mean square of the recorded sample
    masks: bool = False  # whether the difference is that other elements are zero, as after another dropout

    def ratio(self, unit: float, scale: float = 0.0) -> float:
        """Return the error in units of rounding of the larger of `size` and `scale`."""
        if self.equal or self.error == 0:
            return 0.0
        below = unit * max(self.size, scale)
        return self.error / below if below > 0 and math.isfinite(self.error) else math.inf


def distance(recorded: Tensor, replayed: Tensor) -> Distance:
    """Compare two samples. NaN equals NaN."""
    if recorded.shape != replayed.shape:
        return Distance(equal=False, error=math.inf, size=0.0)
    a, b = recorded.double(), replayed.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Distance(recorded.dtype == replayed.dtype, 0.0, size_of(a))
    zeros, far = (a == 0) != (b == 0), (a - b).abs() > 0.1 * torch.maximum(a.abs(), b.abs())
    masks = int(zeros.sum()) > int(far.sum()) // 2
    error = torch.where(same, 0.0, a - b).square().mean().sqrt().item()  # infinite if an inf or NaN differs
    return Distance(False, error if math.isfinite(error) else math.inf, size_of(a), masks)


def size_of(values: Tensor) -> float:
    """Return the root mean square of the finite elements of a sample: masks are often -inf."""
    values = values[values.isfinite()]
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def unit_of(dtype: torch.dtype) -> float:
    """Return the rounding of a dtype relative to its values; 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
