"""Probes of the known bugs of torch's CPU kernels in the installed version; see `known_faults.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from accelcore.fault_probes import steps

__all__ = ["low_precision_sgd", "memory_order"]

_FUSED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


def low_precision_sgd() -> bool:
    """Return whether a step of 1 from 1 leaves elements that are not 0, in either dtype."""
    make = partial(torch.optim.SGD, lr=1.0, fused=True)
    ones = [torch.ones(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    return any(bool(steps(make, one, [one]).any()) for one in ones)


def memory_order() -> bool:
    """Return whether a kernel differs from the loop for a transposed parameter and a contiguous gradient."""
    start, gradient = torch.arange(6.0).reshape(3, 2).t(), torch.arange(-6.0, 0.0).reshape(2, 3)
    return any(
        not torch.allclose(
            steps(partial(kind, lr=0.1, fused=True), start, [gradient] * 2),
            steps(partial(kind, lr=0.1, foreach=False), start, [gradient] * 2),
        )
        for kind in _FUSED
    )
