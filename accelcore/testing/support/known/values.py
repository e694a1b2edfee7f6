"""Known results of a few numbers, and functions to write such results down."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_X = [-2.0, -0.5, 0.0, 1.0, 3.0]
_INF, _NAN = math.inf, math.nan
_NORM = [each / math.sqrt(1.25 + 0.5) for each in (-1.5, -0.5, 0.5, 1.5)]  # eps is inside the root

Compute = Callable[[torch.device], Tensor]


def of_values(function: Callable[[Tensor], Tensor], *values: float, shape: tuple[int, ...] | None = None) -> Compute:
    """Return a computation of a function of these values."""
    return lambda device: function(torch.tensor(values, device=device).reshape(shape or (len(values),)))


def gradient(function: Callable[[Tensor], Tensor], *values: float, shape: tuple[int, ...] | None = None) -> Compute:
    """Return a computation of a function's gradient, of the sum of what it returns."""

    def compute(device: torch.device) -> Tensor:
        leaf = torch.tensor(values, device=device).reshape(shape or (len(values),)).requires_grad_()
        (found,) = torch.autograd.grad(function(leaf).sum(), leaf)
        return found

    return compute


def _far(function: Callable[[Tensor], Tensor]) -> Compute:
    """Return a computation of a function of four numbers far from 0, in fp32 and bf16: the result by 20, to whole ones.

    Their variance is lost if it is computed as a difference of squares.
    """

    def compute(device: torch.device) -> Tensor:
        rows = [torch.tensor([-1.5, -0.5, 0.5, 1.5], device=device) + far for far in (2.0**12, 2.0**6)]
        return torch.cat([function(each.reshape(1, 1, 4)).float().flatten() for each in (rows[0], rows[1].bfloat16())])

    return lambda device: (20 * compute(device)).round()


def index(x: Tensor, *values: int) -> Tensor:
    """Return indices on the device of `x`."""
    return torch.tensor(values, device=x.device)


def _in_place(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        whole = torch.stack([x, x], -1)
        change(whole[:, 1])
        return whole

    return compute


def _bits(x: Tensor) -> Tensor:
    shifted = x >> 1, torch.bitwise_right_shift(x, x.sign().abs()), x << 1
    return torch.cat([*shifted, x & 6, x | 1, x ^ 3, ~x])


def _small(x: Tensor) -> Tensor:
    """Return numbers of fp16 below its least normal one: converted in several ways, and computed; 2 ** 24 times."""
    half, larger = x.half(), (1024 * x).half()
    made = [half, x.double().half(), x.bfloat16().half(), torch.zeros_like(half).copy_(x)]
    made += [torch.stack([x, x], -1).half()]
    made += [larger / 1024, larger * 2.0**-10, torch.stack([half, half, -half]).sum(0), half + half - half]
    return torch.cat([each.float().view(len(x), -1)[:, -1] for each in made]) * 2**24


def _causal(dtype: torch.dtype) -> Compute:
    def compute(device: torch.device) -> Tensor:
        zeros, values = (
            torch.tensor(each, device=device, dtype=dtype) for each in ([[[0.0], [0.0]]], [[[2.0], [4.0]]])
        )
        return functional.scaled_dot_product_attention(zeros, zeros, values, is_causal=True)

    return compute


def _attention_to_nothing(x: Tensor) -> Tensor:
    """Return attention of two queries to two keys, of which the second query sees none, and its gradient."""
    rows, sees = x.view(1, 1, 2, 2).clone().requires_grad_(), torch.tensor([[True, False], [False, False]]).to(x.device)
    for mask in (sees, torch.zeros_like(rows[0, 0]).masked_fill(~sees, -_INF)):
        found = functional.scaled_dot_product_attention(rows, rows.detach(), rows.detach(), attn_mask=mask)
        found.sum().backward()
    assert rows.grad is not None
    return torch.cat([found.flatten(), rows.grad[0, 0, 1]]).detach()


_ROWS = (1.0, 2.0, 3.0, 4.0)
_FAR = [-27.0, -9.0, 9.0, 27.0] * 2  # 20 times -1.5, -0.5, 0.5 and 1.5 over their standard deviation
_LARGE = (300.0, 400.0)  # of which fp16 holds no square

KNOWN_VALUES: dict[str, tuple[Compute, list[float]]] = {
    "gradient of abs": (gradient(torch.abs, *_X), [-1, -1, 0, 1, 1]),
    "gradient of exp": (gradient(torch.exp, 0.0, 1.0), [1, math.e]),
    "logsumexp": (of_values(lambda x: x.logsumexp(0), 1000.0, 1000.0), [1000 + math.log(2)]),
    "rms_norm": (of_values(lambda x: functional.rms_norm(x, (4,), eps=0.5), *_ROWS), [x / 8**0.5 for x in _ROWS]),
    "var, far from 0": (_far(lambda x: x.var(-1)), [33, 33]),
    "std, far from 0": (_far(lambda x: x.std(-1)), [26, 26]),
    "layer_norm, far from 0": (_far(lambda x: functional.layer_norm(x, (4,))), _FAR),
    "batch_norm, far from 0": (_far(lambda x: functional.batch_norm(x, None, None, training=True)), _FAR),
    "instance_norm, far from 0": (_far(functional.instance_norm), _FAR),
    "group_norm, far from 0": (_far(lambda x: functional.group_norm(x, 1)), _FAR),
    "norm of large fp16": (of_values(lambda x: torch.linalg.vector_norm(x.half()), *_LARGE), [500]),
    "norm of large columns in fp16": (of_values(lambda x: x.half().norm(dim=0), *_LARGE, shape=(2, 1)), [500]),
    "norms of large tensors in fp16": (of_values(lambda x: torch._foreach_norm([x.half()])[0], *_LARGE), [500]),
    "std of large fp16": (of_values(lambda x: x.half().std(unbiased=False), -300.0, 300.0), [300]),
    "rms_norm of large fp16": (
        of_values(lambda x: functional.rms_norm(x.half(), (2,)).mul(8).round(), *_LARGE),
        [7, 9],
    ),
    "layer_norm of large fp16": (of_values(lambda x: functional.layer_norm(x.half(), (2,)), -300.0, 300.0), [-1, 1]),
    "mean of bf16": (lambda device: torch.ones(4096, device=device, dtype=torch.bfloat16).mean(), [1.0]),
    "mean of nothing": (lambda device: torch.ones(0, device=device).mean(), [_NAN]),
    "largest with NaN": (of_values(torch.max, 1.0, _NAN, 2.0), [_NAN]),
    "clamp": (
        of_values(lambda x: torch.cat([x.clamp(-1, 1), x.clamp(max=1), x.clamp(min=-1)]), -3.0, 0.5, _NAN, _INF),
        [*(-1, 0.5, _NAN, 1), *(-3, 0.5, _NAN, 1), *(-1, 0.5, _NAN, _INF)],
    ),
    "round": (of_values(torch.round, 0.5, 1.5, 2.5, -0.5, -1.5), [0, 2, 2, 0, -2]),
    "gradient of prod": (gradient(torch.prod, 0.0, 2.0, 3.0), [6, 0, 0]),
    "index_put of one value at repeats": (
        of_values(lambda x: torch.zeros_like(x).index_put((index(x, 0, 0, 2),), x[2], accumulate=True), *_ROWS),
        [6, 0, 3, 0],
    ),
    "binary_cross_entropy_with_logits": (
        of_values(lambda x: functional.binary_cross_entropy_with_logits(x, x * 0, reduction="none"), 0.0, 100.0),
        [math.log(2), 100],
    ),
    "nll_loss with weights": (
        lambda device: functional.nll_loss(
            torch.tensor([[-1.0, 0.0], [0.0, -4.0]], device=device),
            torch.tensor([0, 1], device=device),
            torch.tensor([3.0, 1.0], device=device),
        ),
        [1.75],
    ),
    "layer_norm with weights alone": (
        of_values(lambda x: functional.layer_norm(x, (4,), weight=x, eps=0.5), *_ROWS),
        [a * b for a, b in zip(_NORM, _ROWS, strict=True)],
    ),
    "layer_norm with biases alone": (
        of_values(lambda x: functional.layer_norm(x, (4,), bias=x, eps=0.5), *_ROWS),
        [a + b for a, b in zip(_NORM, _ROWS, strict=True)],
    ),
    "convolution of each channel": (
        lambda device: functional.conv1d(
            torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=device, dtype=torch.bfloat16),
            torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]]], device=device, dtype=torch.bfloat16),
            groups=2,
        ),
        [21, 86],
    ),
    "avg_pool that leaves padding out": (
        of_values(
            lambda x: functional.avg_pool2d(x, (1, 2), padding=(0, 1), count_include_pad=False),
            *_ROWS,
            shape=(1, 1, 1, 4),
        ),
        [1, 2.5, 4],
    ),
    "attention that is causal": (_causal(torch.float32), [2, 3]),
    "attention that is causal, in bf16": (_causal(torch.bfloat16), [2, 3]),
    "attention to nothing": (of_values(_attention_to_nothing, *_ROWS, shape=(2, 2)), [1, 2, 0, 0, 0, 0]),
    "an expanded tensor": (of_values(lambda x: x.expand(2, 2) + 0, 1.0, 2.0), [1, 2, 1, 2]),
    "addmm with out= that is transposed": (
        of_values(lambda x: torch.addmm(x, x, x, out=torch.full_like(x, 77.0).t()), *_ROWS, shape=(2, 2)),
        [8, 12, 18, 26],
    ),
    "copy in place": (of_values(_in_place(lambda x: x.copy_(x.flip(0) + 0)), 1.0, 2.0), [1, 2, 2, 1]),
    "fill in place": (of_values(_in_place(lambda x: x.zero_()), 1.0, 2.0), [1, 0, 2, 0]),
    "cat with nothing": (of_values(lambda x: torch.cat([x[:0], x, x[:0]]), 1.0, 2.0), [1, 2]),
    "rounding to bf16": (of_values(lambda x: x.bfloat16().float(), 1 + 2**-8, 1 + 3 * 2**-8), [1, 1 + 2**-6]),
    "small numbers of fp16": (of_values(_small, 2.0**-24, 3 * 2.0**-24, -(2.0**-16)), [1, 3, -256] * 9),
    "conversion of a transposed matrix": (of_values(lambda x: x.t().bfloat16(), *_ROWS, shape=(2, 2)), [1, 3, 2, 4]),
    "copy of another dtype to a transposed matrix": (
        of_values(lambda x: torch.zeros_like(x, dtype=torch.bfloat16).t().copy_(x), *_ROWS, shape=(2, 2)),
        [1, 2, 3, 4],
    ),
    "conversion to whole numbers": (of_values(lambda x: x.int().float(), 1.9, -1.9), [1, -1]),
    "conversion to truth values": (of_values(lambda x: x.bool().float(), 0.5, 0.0, -0.25, _NAN), [1, 0, 1, 1]),
    "whole numbers and fractions": (
        of_values(lambda x: torch.cat([x.int() * 0.5, x.int() + 0.25, x.int() / 4, x.int() ** 0.5]), 1.0, 9.0),
        [0.5, 4.5, 1.25, 9.25, 0.25, 2.25, 1, 3],
    ),
    "whole numbers compared with fractions": (
        of_values(
            lambda x: torch.cat([x.int() > -0.5, x.int() >= 0.5, x.int() < 0.5, x.int() <= -0.5, x.int() == 0.5]),
            *(0.0, 1.0, -1.0),
        ),
        [*(1, 1, 0), *(0, 1, 0), *(1, 0, 1), *(0, 0, 1), *(0, 0, 0)],
    ),
    "bits of whole numbers": (
        of_values(
            lambda x: torch.cat([_bits(x.to(kind)) for kind in (torch.int8, torch.int32, torch.int64)]), -8.0, 5.0
        ),
        [*(-4, 2, -4, 2, -16, 10, 0, 4, -7, 5, -5, 6, 7, -6)] * 3,
    ),
    "indices from the end": (
        of_values(lambda x: torch.cat([x[index(x, -1, 0)], x.roll(1)[-2:], x.narrow(0, -2, 1)]), *_ROWS),
        [4, 1, 2, 3, 3],
    ),
}
"""Computations on a device by name, and the numbers that they give in order."""
