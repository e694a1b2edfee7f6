"""Loss scaling on the NPU: the core's scaler, with the overflow flag of older chips.

Two things differ from other devices. torch_npu's fused kernels take `grad_scale` and `found_inf`, but its published
AdamW kernel ignores both. So the scaler trusts no kernel to unscale and skip. Chips before Ascend910B clamp an overflow
to the largest number instead of inf, and raise a flag. The flag stays up until it is cleared, and each rank sees only
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

from accelcore.jobs.collectives import Collectives
from accelcore.scaling.dynamic import GradScaler, LossScale


class NpuScaler(GradScaler):
    """Loss scaler that unscales the gradients itself and decides on the host before each step."""

    trusts_kernels = False


class FlagScaler(NpuScaler):
    """Loss scaler that also reads the device's overflow flag, and clears it before the first backward pass of a step.

    `collectives` share an overflow with the other ranks.
    """

    def __init__(self, device: torch.device, settings: LossScale, *, collectives: Collectives) -> None:
        super().__init__(device, settings)
        self._device, self._collectives = device, collectives
        self._cleared = False

    def scale(self, loss: Tensor) -> Tensor:
        if not self._cleared:
            torch_npu.npu_clear_float_status(self._status())
            self._cleared = True
        return super().scale(loss)

    def abandon(self) -> None:
        super().abandon()
        self._cleared = False

    def check(self, gradients: Sequence[Tensor], multiplier: Tensor) -> Tensor:
        # Read first: the check may read and clear the flag.
        raised = torch_npu.npu_get_float_status(self._status())[0].ne(0).float()
        found = torch.maximum(super().check(gradients, multiplier), raised)
        return self._collectives.all_reduce(found, "max")

    def _status(self) -> Tensor:
        return torch.zeros(8, device=self._device)  # the shape that the operators take the flag in
