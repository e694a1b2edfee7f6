"""What the suite compares with: plain torch on the CPU, most of it in float64. None of it is accelcore's own code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["batches", "eps", "error", "network", "weights"]


def eps(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number in `dtype`."""
    return torch.finfo(dtype).eps


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; inf where shapes or finiteness differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(found.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / (scale or 1.0) if found.numel() else 0.0


def network(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """A small classifier of 8 features into 4 classes, the same for the same seed, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


def batches(count: int, rows: int = 16, *, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and classes that can be learned, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, rows, 8, generator=generator)
    return [(rows_, rows_[:, :4].argmax(1)) for rows_ in inputs]


def weights(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Copies of all parameters, on the CPU in float64."""
    parameters: Sequence[Tensor] = list(model.parameters() if isinstance(model, nn.Module) else model)
    return [parameter.detach().cpu().double().clone() for parameter in parameters]
