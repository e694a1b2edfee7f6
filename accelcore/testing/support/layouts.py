"""Arguments of an operator in other layouts, sizes and dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["LAYOUTS", "emptied", "placed", "repeated", "scalars", "wide"]

LAYOUTS = ("", "strided", "transposed")
"""Layouts of arguments: as the sample has them, with gaps between the elements, with dimensions in reverse order."""

_COMPLEX = (torch.complex32, torch.complex64)


def placed(arguments: Any, device: torch.device, layout: str, *, graph: bool = False) -> Any:
    """Return copies of arguments on a device, in one of `LAYOUTS`; with `graph`, leaves that require gradients."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return device
        if not isinstance(value, Tensor):
            return value
        moved = _laid_out(value.detach(), device, layout)
        return moved.requires_grad_(value.requires_grad and graph)

    return pytree.tree_map(move, arguments)


def _laid_out(value: Tensor, device: torch.device, layout: str) -> Tensor:
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.to(device, copy=True)
    if layout == "strided" and value.dim():
        beside = torch.full_like(value, 1) if not value.dtype.is_floating_point else torch.full_like(value, 3.5)
        return torch.stack([value, beside], -1).to(device)[..., 0]
    if layout == "transposed" and value.dim() > 1:
        order = list(range(value.dim()))[::-1]
        return value.permute(order).contiguous().to(device).permute(order)
    count = value.untyped_storage().nbytes() // value.element_size()
    memory = value.as_strided((count,), (1,), 0).to(device, copy=True)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def wide(arguments: Any, dtype: torch.dtype) -> Any:
    """Return the arguments with tensors of `dtype` in float64, complex ones in complex128."""

    def widen(value: Any) -> Any:
        if value is dtype and dtype.is_floating_point:
            return torch.float64
        if not isinstance(value, Tensor):
            return value
        if value.dtype.is_floating_point and value.dtype != torch.float64 and dtype.is_floating_point:
            return value.detach().double().requires_grad_(value.requires_grad)
        if value.dtype in _COMPLEX:
            return value.detach().to(torch.complex128).requires_grad_(value.requires_grad)
        return value

    return pytree.tree_map(widen, arguments)


def emptied(arguments: Any) -> Any:
    """Return the arguments without rows; None if there is no tensor with rows."""
    return _changed(arguments, lambda value, rows: value[:0] if value.dim() and value.shape[0] == rows else value)


def scalars(arguments: Any) -> Any:
    """Return the arguments with the first element of each tensor that is of the first one's shape; None as above."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.numel():
        return None
    return _changed(arguments, lambda value, _: value.reshape(-1)[0] if value.shape == first.shape else value)


def repeated(arguments: Any) -> Any:
    """Return the arguments with indices of which the second half is the first index again; None without indices."""
    several = [
        leaf for leaf in pytree.tree_leaves(arguments)
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.numel() > 1
    ]  # fmt: skip
    if not several:
        return None

    def repeat(value: Tensor, _: int) -> Tensor:
        if value.dtype not in (torch.int64, torch.int32) or value.numel() < 2:
            return value
        flat = value.reshape(-1).clone()
        flat[flat.numel() // 2 :] = flat[0]
        return flat.reshape(value.shape)

    return _changed(arguments, repeat)


def _changed(arguments: Any, change: Any) -> Any:
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.dim() or first.layout != torch.strided:
        return None

    def apply(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        return change(value.detach(), first.shape[0]).clone().requires_grad_(value.requires_grad)

    return pytree.tree_map(apply, arguments)
