"""torch's optimizers with a fused kernel, as routes: their checks, options and state, a shorter way to the kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.optim.fused_kernels import FUSED_KERNELS, FusedKernel
from accelcore.optim.stepping import Updating

__all__ = ["FUSED"]


class _Fused(Updating, torch.optim.Optimizer):
    """Subclasses put this before the torch class whose options they have."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)  # type: ignore[call-arg]  # torch's class comes next
        self._kernel = _kernel_of(type(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernel = _kernel_of(type(self))

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self._kernel.update(self, found_inf, grad_scale)


class FusedAdagrad(_Fused, torch.optim.Adagrad):
    """torch's Adagrad by its fused kernel."""


class FusedAdam(_Fused, torch.optim.Adam):
    """torch's Adam by its fused kernel."""


class FusedAdamW(_Fused, torch.optim.AdamW):
    """torch's AdamW by its fused kernel."""


class FusedSGD(_Fused, torch.optim.SGD):
    """torch's SGD by its fused kernel."""


FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adagrad": FusedAdagrad,
    "adam": FusedAdam,
    "adamw": FusedAdamW,
    "sgd": FusedSGD,
}
"""By the registry's name."""


def _kernel_of(kind: type[torch.optim.Optimizer]) -> FusedKernel:
    return next(FUSED_KERNELS[base] for base in kind.__mro__ if base in FUSED_KERNELS)()
