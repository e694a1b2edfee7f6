"""Operators of torch_npu that cast, transpose, pad and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable


def _confusion_transpose(input: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    return input.permute(perm).reshape(shape) if transpose_first else input.reshape(shape).permute(perm)


def _confusion_transpose_backward(grad: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    # `shape` is the input's, and `transpose_first` says what the backward does: the opposite of the forward.
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    if transpose_first:
        return grad.permute(inverse).reshape(shape)
    return grad.reshape([shape[axis] for axis in perm]).permute(inverse)


def _cast(input: Tensor, dtype: torch.dtype | int, *ignored: object) -> Tensor:
    return input.to(_DTYPES[dtype] if isinstance(dtype, int) else dtype)


# torch_npu passes types as ATen's numbers.
_DTYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


def _pad(input: Tensor, paddings: list[int]) -> Tensor:
    pairs = [paddings[i : i + 2] for i in range(0, len(paddings), 2)]
    return functional.pad(input, [side for pair in reversed(pairs) for side in pair])


def _slice(input: Tensor, offsets: list[int], size: list[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, size, strict=True)):
        input = input.narrow(dim, offset, input.size(dim) - offset if length == -1 else length)
    return input.clone()


def _one_hot(input: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0) -> Tensor:
    classes = torch.arange(depth, device=input.device)
    return torch.where(input.unsqueeze(num_classes) == classes, float(on_value), float(off_value))


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_confusion_transpose": _confusion_transpose,
    "npu_confusion_transpose_backward": _confusion_transpose_backward,
    "npu_transpose": lambda x, perm, require_contiguous=True: x.permute(perm).contiguous(),
    "npu_broadcast": lambda x, size: x.expand(size).contiguous(),
    "npu_reshape": lambda x, shape, can_refresh=False: x.reshape(shape),
    "npu_pad": _pad,
    "npu_slice": _slice,
    "npu_one_hot": _one_hot,
    "npu_dtype_cast": _cast,
    "_npu_dtype_cast": _cast,
    "npu_dtype_cast_": lambda x, src: x.copy_(src),
}
