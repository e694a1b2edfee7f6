"""Gradient clipping in a few launches, whatever the number of parameters.

As `torch.nn.utils.clip_grad_norm_` (Pascanu et al., "On the difficulty of training recurrent neural networks", 2013):
gradients are multiplied by `max_norm / (norm + 1e-6)` where that is below 1. torch multiplies them by a tensor one by
one where a device has no kernel for many; loss scaling has one everywhere, which also looks for overflow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelcore.training.gradients import Gradients

__all__ = ["Clipping", "ClippingBy"]

_ONE_KERNEL = (torch.float32, torch.bfloat16)


class Clipping:
    """Clips the norm of all gradients together.

    Given the gradients of parameters one by one it is torch's `clip_grad_norm_`, to the last bit. In flat memory the
    norm is added up in another order, and may differ in its last bit.

    Args:
        max_norm: the largest 2-norm.
        flagged: whether the device's kernel for unscaling also reads an overflow flag, and then does nothing else.
    """

    def __init__(self, max_norm: float, *, flagged: bool) -> None:
        self._max_norm, self._flagged = max_norm, flagged
        self._overflow: Tensor | None = None  # what the kernel writes its other finding into

    def __call__(self, gradients: list[Tensor], whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Clip gradients, in place, without waiting for the device.

        Args:
            whole: given the norm of these, the norm of all there are on all ranks.

        Returns:
            Their norm before they were clipped.
        """
        norm = whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        factor = (self._max_norm / (norm + 1e-6)).clamp_(max=1.0)
        kinds = {(type(gradient), gradient.dtype) for gradient in gradients}
        if not self._flagged and len(kinds) == 1 and kinds <= {(Tensor, dtype) for dtype in _ONE_KERNEL}:
            if self._overflow is None:
                self._overflow = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, factor.float())
        else:
            torch._foreach_mul_(gradients, factor)
        return norm


class ClippingBy:
    """Clips by a function of the script's: by value, adaptively, or in any other way.

    Args:
        function: given what is trained (parameters, or their fp32 masters) as far as it has a gradient, it changes
            `grad` in place, as `torch.nn.utils.clip_grad_value_` does; a tensor that it puts there instead counts, too.
    """

    def __init__(self, function: Callable[[list[Tensor]], object]) -> None:
        self._function = function

    @torch.no_grad()
    def __call__(self, gradients: Gradients) -> None:
        """Clip the gradients of a window: reduced over ranks, and unscaled."""
        gradients.expose()
        slots = zip(gradients.slots, gradients.received, strict=True)
        trained = [slot.trained for slot, received in slots if received]
        before = [tensor.grad for tensor in trained]
        self._function(list(trained))
        for tensor, gradient in zip(trained, before, strict=True):
            if tensor.grad is not gradient and gradient is not None:
                gradient.copy_(torch.zeros_like(gradient) if tensor.grad is None else tensor.grad)
                tensor.grad = gradient
