"""The routes to optimizers on the CPU: kernels of our own, torch's fused ones, its loops."""

from __future__ import annotations

from functools import partial

import torch

from accelcore.optim.torch_optimizers import register_torch_optimizers
from accelcore.roles.optimizers import Optimizers, Request
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.known_faults import LOW_PRECISION_SGD
from accelcore_cpu.native import refusal
from accelcore_cpu.optimizers import NATIVE

__all__ = ["FUSED", "create_optimizers"]

FUSED = ("adagrad", "adam", "adamw", "sgd")
"""What torch has a fused kernel for."""

_PRIORITY = 20


def create_optimizers() -> Optimizers:
    """The registry of the CPU."""
    registry = Optimizers()
    register_torch_optimizers(registry, fused=FUSED)
    registry.distrust("sgd", "fused", LOW_PRECISION_SGD, when=_in_low_precision)
    for name, kind in NATIVE.items():
        # "any" for all: those that tell parameters apart are told where they lie in flat memory, by place_runs.
        supports = partial(_refusal, by_row=kind.by_row)
        registry.register(name, "native", kind, priority=_PRIORITY, supports=supports, memory="any", scattered=True)
    return registry


def _in_low_precision(request: Request) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in request.parameters)


def _refusal(request: Request, *, by_row: bool) -> str | None:
    """Why our kernel cannot serve a request. Builds the kernels for one that has parameters, where they can."""
    for switch in ("fused", "foreach"):
        if switch in request.options:
            return f"say route=... instead of {switch}="
    for switch in ("capturable", "differentiable"):
        if any(request.values(switch, False)):
            return f"the kernel is not {switch}"
    return refusal(request.parameters, by_row=by_row) or unavailable(build=bool(request.parameters))
