"""Results of operators that are computed by hand, so that no other device can share the mistake."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_X = [-2.0, -0.5, 0.0, 1.0, 3.0]
_INF, _NAN = math.inf, math.nan
_E1, _E2 = math.exp(-1), math.exp(-2)
_SUM = 1 + _E1 + _E2
_NORM = [each / math.sqrt(1.25 + 0.5) for each in (-1.5, -0.5, 0.5, 1.5)]  # eps is inside the root

Compute = Callable[[torch.device], Tensor]


def _erf(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def _of_tanh(x: float) -> float:
    return x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


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


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x + 100], -1)[..., 0]


def _out(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        out = torch.full((len(x), 2), 77.0, device=x.device)[:, 0]
        function(x, out=out)
        return out

    return compute


def _in_place(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        whole = torch.stack([x, x], -1)
        change(whole[:, 1])
        return whole

    return compute


def _bits(x: Tensor) -> Tensor:
    shifted = x >> 1, torch.bitwise_right_shift(x, x.sign().abs()), x << 1
    return torch.cat([*shifted, x & 6, x | 1, x ^ 3, ~x])


def _causal(dtype: torch.dtype) -> Compute:
    def compute(device: torch.device) -> Tensor:
        zeros, values = (
            torch.tensor(each, device=device, dtype=dtype) for each in ([[[0.0], [0.0]]], [[[2.0], [4.0]]])
        )
        return functional.scaled_dot_product_attention(zeros, zeros, values, is_causal=True)

    return compute


def _embedding(weight: Tensor) -> Tensor:
    return functional.embedding(index(weight, 1, 1, 0, 1), weight.reshape(3, 1), padding_idx=0)


_ROWS = (1.0, 2.0, 3.0, 4.0)
_FAR = [-27.0, -9.0, 9.0, 27.0] * 2  # 20 times -1.5, -0.5, 0.5 and 1.5 over their standard deviation
_LARGE = (300.0, 400.0)  # of which fp16 holds no square

KNOWN: dict[str, tuple[Compute, list[float]]] = {
    "gelu": (of_values(functional.gelu, *_X), [_erf(x) for x in _X]),
    "gelu, by tanh": (of_values(lambda x: functional.gelu(x, approximate="tanh"), *_X), [_of_tanh(x) for x in _X]),
    "gradient of gelu": (
        gradient(functional.gelu, *_X),
        [(1 + math.erf(x / 2**0.5)) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in _X],
    ),
    "silu": (of_values(functional.silu, *_X), [x / (1 + math.exp(-x)) for x in _X]),
    "gradient of tanh": (gradient(torch.tanh, *_X), [1 - math.tanh(x) ** 2 for x in _X]),
    "gradient of relu": (gradient(torch.relu, *_X), [0, 0, 0, 1, 1]),
    "gradient of abs": (gradient(torch.abs, *_X), [-1, -1, 0, 1, 1]),
    "gradient of exp": (gradient(torch.exp, 0.0, 1.0), [1, math.e]),
    "gradient of a quotient": (gradient(lambda x: 1 / x, 2.0, -4.0), [-0.25, -0.0625]),
    "softplus": (of_values(functional.softplus, -30.0, 0.0, 30.0), [math.exp(-30), math.log(2), 30]),
    "softmax": (of_values(lambda x: x.softmax(-1), 1.0, 2.0, 3.0), [_E2 / _SUM, _E1 / _SUM, 1 / _SUM]),
    "softmax of columns": (
        of_values(lambda x: x.softmax(0), 0.0, 0.0, 1.0, 2.0, shape=(2, 2)),
        [1 / (1 + math.e), 1 / (1 + math.e**2), 1 / (1 + _E1), 1 / (1 + _E2)],
    ),
    "softmax of a scalar": (lambda device: torch.tensor(5.0, device=device).softmax(0), [1.0]),
    "softmax of large numbers": (of_values(lambda x: x.softmax(0), 1000.0, 1000.0), [0.5, 0.5]),
    "log_softmax of columns": (of_values(lambda x: x.log_softmax(0), 1e4, 1e4, shape=(2, 1)), [-math.log(2)] * 2),
    "logsumexp": (of_values(lambda x: x.logsumexp(0), 1000.0, 1000.0), [1000 + math.log(2)]),
    "gradient of softmax": (
        gradient(lambda x: x.softmax(0) * torch.tensor([1.0, 0.0], device=x.device), 0.0, 0.0),
        [0.25, -0.25],
    ),
    "layer_norm": (of_values(lambda x: functional.layer_norm(x, (4,), eps=0.5), *_ROWS), _NORM),
    "rms_norm": (of_values(lambda x: functional.rms_norm(x, (4,), eps=0.5), *_ROWS), [x / 8**0.5 for x in _ROWS]),
    "batch_norm": (
        of_values(lambda x: functional.batch_norm(x, None, None, training=True, eps=0.5), *_ROWS, shape=(4, 1)),
        _NORM,
    ),
    "var": (of_values(torch.var, *_ROWS), [5 / 3]),
    "var, biased": (of_values(lambda x: x.var(unbiased=False), *_ROWS), [1.25]),
    "std": (of_values(torch.std, *_ROWS), [math.sqrt(5 / 3)]),
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
    "sum of nothing": (lambda device: torch.ones(0, 2, device=device).sum(0), [0, 0]),
    "mean of nothing": (lambda device: torch.ones(0, device=device).mean(), [_NAN]),
    "product of nothing": (lambda device: torch.ones(0, 2, device=device).prod(0), [1, 1]),
    "all of nothing": (lambda device: torch.ones(0, device=device).bool().all().float(), [1]),
    "a product over nothing": (
        lambda device: torch.ones(2, 0, device=device) @ torch.ones(0, 1, device=device),
        [0, 0],
    ),
    "largest with NaN": (of_values(torch.max, 1.0, _NAN, 2.0), [_NAN]),
    "clamp": (
        of_values(lambda x: torch.cat([x.clamp(-1, 1), x.clamp(max=1), x.clamp(min=-1)]), -3.0, 0.5, _NAN, _INF),
        [*(-1, 0.5, _NAN, 1), *(-3, 0.5, _NAN, 1), *(-1, 0.5, _NAN, _INF)],
    ),
    "round": (of_values(torch.round, 0.5, 1.5, 2.5, -0.5, -1.5), [0, 2, 2, 0, -2]),
    "remainder": (of_values(lambda x: x % 3, -1.0, 4.0, -3.0), [2, 1, 0]),
    "floor_divide": (of_values(lambda x: x // 3, -1.0, 4.0), [-1, 1]),
    "cumsum": (of_values(lambda x: x.cumsum(0), *_ROWS, shape=(2, 2)), [1, 2, 4, 6]),
    "gradient of cumsum": (gradient(lambda x: x.cumsum(0), *_ROWS), [4, 3, 2, 1]),
    "gradient of prod": (gradient(torch.prod, 0.0, 2.0, 3.0), [6, 0, 0]),
    "gradient of norm": (gradient(torch.linalg.vector_norm, 3.0, 4.0), [0.6, 0.8]),
    "sort, stable": (of_values(lambda x: x.sort(stable=True).indices.float(), 1.0, 0.0, 1.0, 0.0), [1, 3, 0, 2]),
    "topk": (of_values(lambda x: x.topk(2).values, 1.0, 4.0, 2.0, 3.0), [4, 3]),
    "gradient of topk": (gradient(lambda x: x.topk(2).values, 1.0, 4.0, 2.0, 3.0), [0, 1, 0, 1]),
    "index_add of repeats": (
        of_values(lambda x: torch.zeros_like(x).index_add(0, index(x, 1, 1, 1, 0), x), *_ROWS),
        [4, 6, 0, 0],
    ),
    "index_put of repeats": (
        of_values(lambda x: torch.zeros_like(x).index_put((index(x, 2, 2, 0, 2),), x, accumulate=True), *_ROWS),
        [3, 0, 7, 0],
    ),
    "index_put of one value at repeats": (
        of_values(lambda x: torch.zeros_like(x).index_put((index(x, 0, 0, 2),), x[2], accumulate=True), *_ROWS),
        [6, 0, 3, 0],
    ),
    "scatter_add of repeats": (
        of_values(lambda x: torch.zeros_like(x).scatter_add(0, index(x, 0, 0, 0, 0), x), *_ROWS),
        [10, 0, 0, 0],
    ),
    "gradient of repeats": (gradient(lambda x: x[index(x, 1, 1, 0)], *_ROWS), [1, 2, 0, 0]),
    "gradient of gather": (gradient(lambda x: x.gather(0, index(x, 3, 3, 3)), *_ROWS), [0, 0, 0, 3]),
    "gradient of embedding": (gradient(_embedding, 1.0, 2.0, 3.0), [0, 3, 0]),
    "gradient of expand": (gradient(lambda x: x.expand(5), 2.0), [5]),
    "cross_entropy that ignores": (
        lambda device: functional.cross_entropy(
            torch.zeros(3, 4, device=device), torch.tensor([1, -100, 2], device=device)
        ),
        [math.log(4)],
    ),
    "cross_entropy, smoothed": (
        lambda device: functional.cross_entropy(
            torch.tensor([[0.0, math.log(3)]], device=device), torch.tensor([1], device=device), label_smoothing=0.5
        ),
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))],
    ),
    "gradient of cross_entropy": (
        gradient(lambda x: functional.cross_entropy(x.reshape(1, 2), index(x, 1)), 0.0, 0.0),
        [0.5, -0.5],
    ),
    "mse_loss": (of_values(lambda x: functional.mse_loss(x, x * 0), *_ROWS), [7.5]),
    "huber_loss": (of_values(lambda x: functional.huber_loss(x, x * 0, reduction="none"), 0.5, 3.0), [0.125, 2.5]),
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
    "gradient of pools that overlap": (
        gradient(lambda x: functional.max_pool2d(x, (1, 2), stride=1), 1.0, 3.0, 2.0, 0.0, shape=(1, 1, 1, 4)),
        [0, 2, 1, 0],
    ),
    "gradient of a maximum that comes twice": (gradient(lambda x: x.amax(0), 2.0, 1.0, 2.0), [0.5, 0, 0.5]),
    "gradient of equal operands": (
        gradient(lambda x: torch.maximum(x, x.detach()), 1.0, 2.0),
        [0.5, 0.5],
    ),
    "convolution": (
        of_values(
            lambda x: functional.conv1d(x, torch.tensor([[[1.0, 10.0]]], device=x.device)), *_ROWS, shape=(1, 1, 4)
        ),
        [21, 32, 43],
    ),
    "avg_pool with padding": (
        of_values(lambda x: functional.avg_pool1d(x, 2, padding=1), *_ROWS, shape=(1, 1, 4)),
        [0.5, 2.5, 2],
    ),
    "avg_pool that leaves padding out": (
        of_values(
            lambda x: functional.avg_pool2d(x, (1, 2), padding=(0, 1), count_include_pad=False),
            *_ROWS,
            shape=(1, 1, 1, 4),
        ),
        [1, 2.5, 4],
    ),
    "max_pool with padding": (
        of_values(lambda x: functional.max_pool1d(-x, 2, padding=1), *_ROWS, shape=(1, 1, 4)),
        [-1, -2, -4],
    ),
    "attention that is causal": (_causal(torch.float32), [2, 3]),
    "attention that is causal, in bf16": (_causal(torch.bfloat16), [2, 3]),
    "a transposed matrix": (
        of_values(lambda x: x.t().exp().log() @ torch.tensor([1.0, 10.0], device=x.device), *_ROWS, shape=(2, 2)),
        [31, 42],
    ),
    "a sum of every other element": (of_values(lambda x: _strided(x).sum(), *_ROWS), [10]),
    "a product of every other element": (of_values(lambda x: _strided(x) * _strided(x), *_ROWS), [1, 4, 9, 16]),
    "a softmax of every other element": (of_values(lambda x: _strided(x).softmax(0), 0.0, math.log(3)), [0.25, 0.75]),
    "an expanded tensor": (of_values(lambda x: x.expand(2, 2) + 0, 1.0, 2.0), [1, 2, 1, 2]),
    "add with out=": (of_values(_out(lambda x, out: torch.add(x, 1, out=out)), *_ROWS), [2, 3, 4, 5]),
    "cumsum with out=": (of_values(_out(lambda x, out: torch.cumsum(x, 0, out=out)), *_ROWS), [1, 3, 6, 10]),
    "addmm with out= that is transposed": (
        of_values(lambda x: torch.addmm(x, x, x, out=torch.full_like(x, 77.0).t()), *_ROWS, shape=(2, 2)),
        [8, 12, 18, 26],
    ),
    "mul in place": (of_values(_in_place(lambda x: x.mul_(10)), 1.0, 2.0), [1, 10, 2, 20]),
    "relu in place": (of_values(_in_place(torch.relu_), -1.0, 2.0), [-1, 0, 2, 2]),
    "copy in place": (of_values(_in_place(lambda x: x.copy_(x.flip(0) + 0)), 1.0, 2.0), [1, 2, 2, 1]),
    "fill in place": (of_values(_in_place(lambda x: x.zero_()), 1.0, 2.0), [1, 0, 2, 0]),
    "cat with nothing": (of_values(lambda x: torch.cat([x[:0], x, x[:0]]), 1.0, 2.0), [1, 2]),
    "where": (of_values(lambda x: torch.where(x > 1, x, -x), 1.0, 2.0), [-1, 2]),
    "gradient of where": (gradient(lambda x: torch.where(x > 1, x * 2, x * 3), 1.0, 2.0), [3, 2]),
    "upsampling": (
        of_values(
            lambda x: functional.interpolate(x, scale_factor=2.0, mode="linear", align_corners=False),
            0.0,
            4.0,
            shape=(1, 1, 2),
        ),
        [0, 1, 3, 4],
    ),
    "bicubic upsampling": (
        of_values(lambda x: functional.interpolate(x, (1, 4), mode="bicubic"), 0.0, 4.0, shape=(1, 1, 1, 2)),
        [-0.421875, 0.90625, 3.09375, 4.421875],  # of Keys' cubic with a = -0.75
    ),
    "rounding to bf16": (of_values(lambda x: x.bfloat16().float(), 1 + 2**-8, 1 + 3 * 2**-8), [1, 1 + 2**-6]),
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
