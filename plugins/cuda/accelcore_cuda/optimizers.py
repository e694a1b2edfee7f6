"""The optimizers of CUDA: torch's fused kernels, then its foreach kernels, then its loops."""

from __future__ import annotations

import torch

from accelcore.optim.torch_optimizers import register_torch_optimizers
from accelcore.roles.optimizers import Optimizers

__all__ = ["create_optimizers", "fused_kernels"]

# torch 2.11's Adagrad refuses fused=True on CUDA although the kernel is there; that of 2.13 takes it.
_FUSED_SINCE = {"adagrad": "2.13", "adam": "2.11", "adamw": "2.11", "sgd": "2.11"}


def fused_kernels() -> tuple[str, ...]:
    """The optimizers that this build of torch steps by a fused kernel on CUDA."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(
        name
        for name, since in _FUSED_SINCE.items()
        if torch.__version__ >= since and has_kernel(f"aten::_fused_{name}_", "CUDA")
    )


def create_optimizers(fused: tuple[str, ...]) -> Optimizers:
    """The registry of a CUDA backend."""
    registry = Optimizers()
    register_torch_optimizers(registry, fused=fused, prefers_foreach=True)
    return registry
