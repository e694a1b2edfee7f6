"""The optimizers of CUDA: torch's fused kernels, then its foreach kernels, then its loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.torch_optimizers import FOREACH_PRIORITY, register_torch_optimizers
from accelcore.roles.optimizers import Factory, Optimizers, Request

__all__ = ["create_optimizers", "fused_kernels"]

_PRIORITY = 5  # between torch's loops and its fused kernels
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
    registry = _ForeachBeforeLoop()
    register_torch_optimizers(registry, fused=fused)
    return registry


class _ForeachBeforeLoop(Optimizers):
    """Takes torch's foreach routes before its loops: on a GPU a few launches for all tensors beat some for each."""

    def register(
        self,
        name: str,
        route: str,
        factory: Factory,
        *,
        priority: int = 0,
        supports: Callable[[Request], str | None] = lambda request: None,
    ) -> None:
        if (route, priority) != ("foreach", FOREACH_PRIORITY):
            super().register(name, route, factory, priority=priority, supports=supports)
            return

        def suits(request: Request) -> str | None:
            return supports(request) or _unfit_for_foreach(request)

        super().register(name, route, factory, priority=_PRIORITY, supports=suits)


def _unfit_for_foreach(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the foreach kernels cannot be differentiated through"
    numbers: list[Any] = [*request.options.values(), *(value for group in request.groups for value in group.values())]
    parts = [part for value in numbers for part in (value if isinstance(value, tuple | list) else (value,))]
    if any(isinstance(part, Tensor) for part in parts) and not all(request.values("capturable", False)):
        return "the foreach kernels take tensors as options only where capturable=True"
    return None
