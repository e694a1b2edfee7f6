"""What the device's matrix unit takes: the operators that run on it refuse other element types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["OPERATORS", "check_dtypes"]

OPERATORS = frozenset({
    "_convolution", "_slow_conv2d_forward", "addbmm", "addmm", "addmm_", "addmv", "baddbmm", "baddbmm_", "bmm",
    "conv_tbc", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable", "convolution",
    "matmul_backward", "mm", "mv", "npu_bmmV2", "npu_conv2d", "npu_conv2d_backward", "npu_conv3d", "npu_convolution",
    "npu_conv3d_backward", "npu_convolution_backward", "npu_linear", "npu_linear_backward",
})  # fmt: skip
"""Their names, without overloads."""

_TAKEN = frozenset({torch.float32, torch.float16, torch.bfloat16})


def check_dtypes(name: str, tensors: Iterable[Tensor]) -> None:
    """Refuse what the operator does not take.

    Raises:
        RuntimeError: a tensor is of another type; a device's error has the code EZ1001.
    """
    for tensor in tensors:
        if tensor.dtype not in _TAKEN:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise RuntimeError(
                f"EMULATED: npu operator {name} takes float32, float16 and bfloat16, not {dtype} (on a device EZ1001)"
            )
