"""Loss scaling on the NPU: the core's scaler, the host between check and step, and the overflow flag of older parts.

Two things differ from other devices. torch_npu's fused kernels take `grad_scale` and `found_inf` as torch's do, but its
AdamW kernel, as published, uses neither; so no kernel is trusted to unscale and skip. And the parts before Ascend910B
clamp what overflows to the largest number instead of making it inf: there the device raises a flag, which stays up
until it is cleared, and which says nothing to the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch_npu
from torch import Tensor

from accelcore.jobs.collectives import Collectives
from accelcore.scaling.dynamic import GradScaler, LossScale

__all__ = ["FlagScaler", "NpuScaler"]


class NpuScaler(GradScaler):
    """The core's scaler, which unscales the gradients itself and asks the host before each step."""

    trusts_kernels = False


class FlagScaler(NpuScaler):
    """Also reads the device's overflow flag, cleared before the first backward pass of each step.

    Args:
        device: the NPU.
        settings: how the scale starts and moves.
        collectives: over which ranks tell each other of an overflow.
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
        # Read first: the check itself may read the flag and put it down.
        raised = torch_npu.npu_get_float_status(self._status())[0].ne(0).float()
        found = torch.maximum(super().check(gradients, multiplier), raised)
        return self._collectives.all_reduce(found, "max")

    def _status(self) -> Tensor:
        return torch.zeros(8, device=self._device)  # the operators' own form of the flag
