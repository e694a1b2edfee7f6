"""Routes of optimizers on the CPU: our kernels, torch's fused kernels, torch's loops."""

from __future__ import annotations

from functools import partial

import torch

from accelcore.optim.registry import Optimizers
from accelcore.optim.route import Request
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.known_faults import LOW_PRECISION_SGD
from accelcore_cpu.native import refusal
from accelcore_cpu.optimizers import NATIVE

__all__ = ["FUSED", "create_optimizers"]

FUSED = ("adagrad", "adam", "adamw", "sgd")
"""Optimizers with a fused kernel in torch."""

_PRIORITY = 20


def create_optimizers() -> Optimizers:
    """Create the registry of the CPU."""
    registry = Optimizers()
    register_torch_optimizers(registry, fused=FUSED)
    registry.distrust("sgd", "fused", LOW_PRECISION_SGD, when=_in_low_precision)
    for name, kind in NATIVE.items():
        # "any" for all: `place_runs` gives the parameters in flat memory to kernels that tell parameters apart.
        supports = partial(_refusal, by_row=kind.by_row)
        registry.register(name, "native", kind, priority=_PRIORITY, supports=supports, memory="any", scattered=True)
    return registry


def _in_low_precision(request: Request) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in request.parameters)


def _refusal(request: Request, *, by_row: bool) -> str | None:
    """Return why our kernel cannot serve a request, or None. Builds the kernels if the request has parameters."""
    for switch in ("capturable", "differentiable"):
        if any(request.values(switch, False)):
            return f"the kernel is not {switch}"
    return refusal(request.parameters, by_row=by_row) or unavailable(build=bool(request.parameters))
