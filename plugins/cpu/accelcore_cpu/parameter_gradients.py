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

_FEW = 3  # of two numbers the sum is rounded once
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
    if not accumulate or total.dtype not in LOW_PRECISION or values.numel() < _FEW:
        found: Tensor = torchs(total, indices, values, accumulate, unsafe)
        return found
    return total.copy_(torchs(total.float(), indices, values.float(), True, unsafe))
