"""What the faults of the CPU's kernels ask of the installed version; see `known_faults.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from accelcore.fault_probes import steps

__all__ = ["low_precision_sgd", "memory_order"]

_FUSED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


def low_precision_sgd() -> bool:
    """A step of 1 from 1: is it not 0 everywhere, in either dtype?"""
    make = partial(torch.optim.SGD, lr=1.0, fused=True)
    ones = [torch.ones(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    return any(bool(steps(make, one, [one]).any()) for one in ones)


def memory_order() -> bool:
    """A transposed parameter, and a gradient that is not: does any kernel differ from the loop?"""
    start, gradient = torch.arange(6.0).reshape(3, 2).t(), torch.arange(-6.0, 0.0).reshape(2, 3)
    return any(
        not torch.allclose(
            steps(partial(kind, lr=0.1, fused=True), start, [gradient] * 2),
            steps(partial(kind, lr=0.1, foreach=False), start, [gradient] * 2),
        )
        for kind in _FUSED
    )
