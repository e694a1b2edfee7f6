"""Dropout with masks of the device's size: a bit for each element, in blocks of 128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK, _BYTE = 128, 8
_BITS = tuple(1 << bit for bit in range(_BYTE))


def _scaled(input: Tensor, kept: Tensor, p: float) -> Tensor:
    return torch.zeros_like(input) if p >= 1 else input * kept.reshape(input.shape) / (1 - p)


def _packed(kept: Tensor) -> Tensor:
    flat = kept.flatten()
    padded = functional.pad(flat, (0, -flat.numel() % _BLOCK)).reshape(-1, _BYTE)
    return (padded * torch.tensor(_BITS, dtype=torch.uint8, device=kept.device)).sum(1, dtype=torch.uint8)


def _unpacked(mask: Tensor, count: int) -> Tensor:
    if mask.dtype != torch.uint8 or mask.numel() != -(-count // _BLOCK) * _BLOCK // _BYTE:
        raise RuntimeError(
            f"EMULATED: the device takes a mask of dropout as its own operators return it, a bit for each of {count} "
            f"elements, not {mask.numel()} of {mask.dtype}"
        )
    bits = mask.unsqueeze(1) & torch.tensor(_BITS, dtype=torch.uint8, device=mask.device)
    return (bits != 0).flatten()[:count]


def _kept(input: Tensor, p: float) -> Tensor:
    return torch.rand(input.shape, device=input.device) >= p


def _dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    kept = _kept(input, p)
    return _scaled(input, kept, p), _packed(kept)


def _dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    return _scaled(grad_output, _unpacked(mask, grad_output.numel()), p)


def _byte_dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    kept = _kept(input, p)
    return _scaled(input, kept, p), kept.to(torch.uint8).flatten()


def _native_dropout(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    if p == 0 or train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    return _dropout(input, p)


def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    if scale == 0:
        return torch.zeros_like(grad_output)
    return grad_output.clone() if scale == 1 else _dropout_backward(grad_output, mask, 1 - 1 / scale)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_npu_dropout": _dropout,
    "npu_dropout_backward": _dropout_backward,
    "_dropout_with_byte_mask": _byte_dropout,
    "_dropout_with_byte_mask_backward": lambda grad, mask, p: _scaled(grad, mask, p),
    "native_dropout": _native_dropout,
    "native_dropout_backward": _native_dropout_backward,
}
