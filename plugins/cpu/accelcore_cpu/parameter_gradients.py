"""Gradients of parameters that torch's CPU kernels sum in bf16 or fp16: summed in fp32.

A sum of rows in bf16 stands still after some hundred: each further number is below half the spacing of its digits.
These kernels are below autograd and autocast. They return the gradients of the layer's inputs as torch's own do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.precision.dispatcher import Kernel, replace_kernels
from accelcore.precision.policy import LOW_PRECISION

_INTEGERS = (torch.int64, torch.int32)
_aten = torch.ops.aten
_AT_A_TIME = 2**18
"""Elements that are in fp32 at a time: they stay in the cache, and a sum of all rows is one of shorter sums."""


def replace_parameter_gradients() -> None:
    """Sum the gradients of layer norms, embeddings and indexing in fp32 from now on."""
    kernels: dict[Any, Kernel] = {
        _aten.native_layer_norm_backward.default: _of_layer_norm,
        _aten.embedding_dense_backward.default: _of_embedding,
        _aten._embedding_bag_dense_backward.default: _of_embedding,
        _aten._index_put_impl_.default: _of_indexing,
    }
    replace_kernels("gradients of parameters", kernels, "CPU")


def _of_layer_norm(
    torchs: Kernel, gradient: Tensor, rows: Tensor, shape: list[int], mean: Tensor, deviation: Tensor,
    weight: Tensor | None, bias: Tensor | None, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if rows.dtype not in LOW_PRECISION or not any(wanted[1:]) or not rows.numel():
        found: tuple[Tensor | None, ...] = torchs(gradient, rows, shape, mean, deviation, weight, bias, wanted)
        return found
    of_rows, _, _ = torchs(gradient, rows, shape, mean, deviation, weight, bias, [wanted[0], False, False])
    count = mean.numel()
    width = rows.numel() // count
    parameters = [None if each is None else each.reshape(width).float() for each in (weight, bias)]
    step = max(1, _AT_A_TIME // width)
    parts = (torch.split(each.reshape(count, -1), step) for each in (gradient, rows, mean, deviation))
    sums: list[Tensor | None] = [None, None]
    for part in zip(*parts, strict=True):
        of_part, part_rows, *statistics = (each.float() for each in part)
        new = torchs(of_part, part_rows, [width], *statistics, *parameters, [False, *wanted[1:]])[1:]
        sums = [one if total is None else total.add_(one) for total, one in zip(sums, new, strict=True)]
    of_parameters = (
        None if total is None or each is None else total.to(each.dtype).reshape(each.shape)
        for total, each in zip(sums, (weight, bias), strict=True)
    )
    return of_rows, *of_parameters


def _of_embedding(torchs: Kernel, gradient: Tensor, *arguments: Any) -> Tensor:
    dtype = gradient.dtype
    if dtype in LOW_PRECISION:
        arguments = tuple(
            each.float() if isinstance(each, Tensor) and each.dtype is dtype else each for each in arguments
        )
        gradient = gradient.float()
    found: Tensor = torchs(gradient, *arguments)
    return found.to(dtype)


def _of_indexing(
    torchs: Kernel, total: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    at = tuple(each for each in indices if each is not None)
    repeats = any(each.dtype in _INTEGERS for each in at)  # a mask names each place once: that sum is rounded once
    if not accumulate or total.dtype not in LOW_PRECISION or not repeats:
        found: Tensor = torchs(total, indices, values, accumulate, unsafe)
        return found
    if all(each is not None and each.dtype in _INTEGERS for each in indices[: len(at)]):
        at = tuple(_aten.broadcast_tensors(at))
        rest = total.shape[len(at) :]
        if total.numel() > max(2 * at[0].numel() * rest.numel(), _AT_A_TIME):  # else a pass over it all is quicker
            return _add_to_rows(torchs, total, at, values.float().broadcast_to((*at[0].shape, *rest)), unsafe)
    return total.copy_(torchs(total.float(), indices, values.float(), True, unsafe))


def _add_to_rows(torchs: Kernel, total: Tensor, at: tuple[Tensor, ...], values: Tensor, unsafe: bool) -> Tensor:
    """Add the values in fp32 to the rows that `at` names; the other rows are neither read nor written."""
    sizes = total.shape[: len(at)]
    total.new_empty(()).expand(sizes)[at]  # raises torch's error for an index outside
    place = torch.zeros_like(at[0], dtype=torch.int64)
    for size, each in zip(sizes, at, strict=True):
        place.mul_(size).add_(each.remainder(size))
    named, inverse, _ = _aten._unique2(place, return_inverse=True)
    rows = torch.unravel_index(named, sizes)
    sums = total[rows].float()
    sums.index_add_(0, inverse.flatten(), values.reshape(place.numel(), *total.shape[len(at) :]))
    torchs(total, list(rows), sums.to(total.dtype), False, unsafe)
    return total
