"""Gradient clipping in a few kernel launches, as `torch.nn.utils.clip_grad_norm_`.

If a device has no kernel for many tensors, torch multiplies them one by one. The kernel of loss scaling takes many
tensors on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from accelcore.training.gradients import Gradients

__all__ = ["Clipping", "clip_by"]

_ONE_KERNEL = (torch.float32, torch.bfloat16)


class Clipping:
    """Clip the norm of all gradients together.

    For one tensor a parameter the result is that of torch's `clip_grad_norm_`, to the last bit. In flat memory the
    norm is summed in another order and may differ in its last bit. `flagged`: whether the device's kernel for unscaling
    reads an overflow flag, and skips its work if it is set.
    """

    def __init__(self, max_norm: float, *, flagged: bool) -> None:
        self._max_norm, self._flagged = max_norm, flagged
        self._overflow: Tensor | None = None  # the kernel's overflow result, which is not needed here

    def __call__(self, gradients: list[Tensor], whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Clip gradients in place and return their norm before; `whole` turns this rank's norm into that of all."""
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


@torch.no_grad()
def clip_by(function: Callable[[list[Tensor]], object], gradients: Gradients) -> None:
    """Clip by a function of the script, which changes or replaces each `grad`; see `clip` of `TrainerOptions`."""
    gradients.expose()
    slots = zip(gradients.slots, gradients.received, strict=True)
    trained = [slot.trained for slot, received in slots if received]
    before = [tensor.grad for tensor in trained]
    function(list(trained))
    for tensor, gradient in zip(trained, before, strict=True):
        if tensor.grad is not gradient and gradient is not None:
            gradient.copy_(torch.zeros_like(gradient) if tensor.grad is None else tensor.grad)
            tensor.grad = gradient
