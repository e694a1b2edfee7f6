"""Gradient clipping in a few launches, whatever the number of parameters.

As `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013):
gradients are multiplied by `max_norm / (norm + 1e-6)` where that is below 1. torch multiplies them by a tensor one by
one where a device has no kernel for many; loss scaling has one everywhere, which also looks for overflow.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Clipping"]

_ONE_KERNEL = (torch.float32, torch.bfloat16)


class Clipping:
    """Clips the norm of all gradients together.

    Args:
        max_norm: the largest 2-norm.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._overflow: Tensor | None = None  # what the kernel writes its other finding into

    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of `parameters`, in place, without waiting for the device."""
        parameters = list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        kinds = {(type(gradient), gradient.dtype, gradient.layout) for gradient in gradients}
        if len(kinds) != 1 or not kinds <= {(Tensor, dtype, torch.strided) for dtype in _ONE_KERNEL}:
            nn.utils.clip_grad_norm_(parameters, self._max_norm)
            return
        if self._overflow is None:
            self._overflow = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        factor = (self._max_norm / (norm.float() + 1e-6)).clamp_(max=1.0)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, factor)
