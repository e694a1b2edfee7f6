"""The fastest that this card multiplies bf16 matrices, which is what a model's speed is held against."""

from __future__ import annotations

import torch

from benchmarks.gpu.device import Device
from benchmarks.paired import Spread, sample

__all__ = ["matmul_ceiling"]

_SIZES, _TOY_SIZES = (4096, 8192, 16384), (32, 64)


def matmul_ceiling(device: Device) -> dict[str, float]:
    """Operations a second for the product of two square bf16 matrices, by their size, and the largest of them.

    The numbers in the matrices are random: a card's power, and with it its clock, depends on them.
    """
    found: dict[str, float] = {}
    for size in _TOY_SIZES if device.toy else _SIZES:
        left, right = (torch.randn(size, size, device=device.torch, dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(out: torch.Tensor = product, left: torch.Tensor = left, right: torch.Tensor = right) -> None:
            torch.mm(left, right, out=out)

        rounds, seconds = (2, 0.0) if device.toy else (10, 0.1)
        taken = sample({"mm": multiply}, rounds=rounds, seconds=seconds, clock=device.clock)["mm"]
        found[f"matmul_{size}_operations_per_second"] = 2 * size**3 / Spread.of(taken).median
    return {**found, "ceiling_operations_per_second": max(found.values())}
