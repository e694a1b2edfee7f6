"""torch's optimizers with a fused kernel, as routes: their checks, options and state, a shorter way to the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from accelcore.optim.fused_kernels import AdagradKernel, AdamKernel, FusedKernel, SGDKernel
from accelcore.optim.stepping import Updating

__all__ = ["FUSED", "KERNELS"]

KERNELS: dict[type[torch.optim.Optimizer], type[FusedKernel]] = {
    torch.optim.Adagrad: AdagradKernel,
    torch.optim.Adam: AdamKernel,
    torch.optim.AdamW: AdamKernel,
    torch.optim.SGD: SGDKernel,
}
"""What updates the parameters of each of torch's classes that has a fused kernel."""


class _Fused(Updating, torch.optim.Optimizer):
    """Subclasses put this before the torch class whose options they have."""

    torchs: ClassVar[type[torch.optim.Optimizer]]

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)  # type: ignore[call-arg]  # torch's class comes next
        self._kernel = KERNELS[self.torchs]()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kernel = KERNELS[self.torchs]()

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self._kernel.update(self, found_inf, grad_scale)


def _fused(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    return type(f"Fused{kind.__name__}", (_Fused, kind), {"torchs": kind, "__doc__": f"torch's {kind.__name__}."})


FUSED = {kind.__name__.lower(): _fused(kind) for kind in KERNELS}
"""By the registry's name."""
