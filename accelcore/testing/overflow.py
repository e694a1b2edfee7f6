"""Overflow as it comes about: by arithmetic of the device, because not every device shows it as inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["overflow", "spoil"]


def overflow(device: torch.device) -> Tensor:
    """Too large for fp32: inf, or where the device clamps, its largest number, and the flag that it raises then."""
    largest = torch.full((), torch.finfo(torch.float32).max, device=device)
    return largest * largest


def spoil(parameter: nn.Parameter, value: float, element: int = -1) -> None:
    """Make an element of a gradient inf, -inf or NaN, as far as the device knows them."""
    assert parameter.grad is not None
    found = overflow(parameter.device)
    parameter.grad[element] = found - found if math.isnan(value) else math.copysign(1.0, value) * found
