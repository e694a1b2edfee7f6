"""Known results of arguments that few scripts give: `dtype=`, grouped heads, lists in other strides, growing memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from accelcore.testing.support.known.values import Compute, gradient, index, of_values

_E = math.e
_INF, _NAN = math.inf, math.nan
_SQUARE = [1.0, 2.0, 3.0, 4.0]


def _cube(device: torch.device) -> Tensor:
    return torch.arange(24.0, device=device).reshape(2, 3, 4)


def _of_cube(function: Callable[[Tensor], Tensor]) -> Compute:
    return lambda device: function(_cube(device))


def _written_apart(cube: Tensor) -> Tensor:
    written = torch.zeros_like(cube)
    written[index(cube, 0, 1), :, index(cube, 3, 0)] = cube[0, :2, :3]
    return torch.stack([*written[0, :, 3], *written[1, :, 0], written.sum()])


def _gradient_apart(cube: Tensor) -> Tensor:
    leaf = cube.requires_grad_()
    chosen = leaf[index(cube, 0, 0), :, index(cube, 3, 3)] * torch.tensor([[1.0], [10.0]], device=cube.device)
    (found,) = torch.autograd.grad(chosen.sum(), leaf)
    return torch.stack([*found[0, :, 3], found.sum()])


def _low(dtype: torch.dtype, function: Callable[[Tensor], Tensor], *values: float) -> Compute:
    """Return a computation of a function of these values in another dtype, whose result has to be in fp32."""

    def compute(device: torch.device) -> Tensor:
        result = function(torch.tensor(values, device=device, dtype=dtype))
        assert result.dtype == torch.float32, f"with dtype=torch.float32 it is {result.dtype}"
        return result

    return compute


def _statistics(dtype: torch.dtype) -> Compute:
    """Return a computation of the running mean, in fp32, of two numbers whose mean the dtype cannot hold."""

    def compute(device: torch.device) -> Tensor:
        rows = torch.tensor([[1.0], [1.0 + torch.finfo(dtype).eps]], device=device, dtype=dtype)
        mean, variance = torch.zeros(1, device=device), torch.ones(1, device=device)
        functional.batch_norm(rows, mean, variance, training=True, momentum=1.0)
        return mean

    return compute


def _gradients_of_statistics(device: torch.device) -> Tensor:
    """Return the gradients, in fp32, of the weight and bias that normalize 514 numbers in bf16."""
    rows = torch.tensor([-1.0, 1.0], device=device, dtype=torch.bfloat16).repeat(257)[:, None]
    weight, bias = (torch.ones(1, device=device, requires_grad=True) for _ in range(2))
    output = functional.batch_norm(rows, None, None, weight, bias, training=True, eps=1e-6)
    given = torch.where(rows > 0, 1.0, 0.0).to(output.dtype)
    return torch.stack(torch.autograd.grad(output, (weight, bias), given))


def _grouped(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return attention of four heads to two heads of keys and values, which are 1 and 2, and the values."""
    queries, keys = torch.zeros(1, 4, 1, 8, device=device), torch.zeros(1, 2, 2, 8, device=device)
    values = torch.tensor([1.0, 2.0], device=device)[None, :, None, None].repeat(1, 1, 2, 8).requires_grad_()
    return functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)[0, :, 0, 0], values


def _gradient_of_grouped(device: torch.device) -> Tensor:
    output, values = _grouped(device)
    (found,) = torch.autograd.grad(output, values, torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device))
    return found.sum((0, 2, 3))


_MASKS = [*product((1, 2), (1, 2), (1, 3), (4,)), (1, 4), (3, 4)]


def _attention_by_masks(*, gradient: bool) -> Compute:
    """Return a computation of attention by masks of every shape: how often the result, or the masks' gradient, is off.

    Queries are 0, so that the mask alone decides.
    """

    def compute(device: torch.device) -> Tensor:
        queries, keys = (torch.zeros(2, 2, count, 8, device=device) for count in (3, 4))
        values, given, wrong = torch.arange(64.0).view(2, 2, 4, 4) / 8, torch.arange(48.0).view(2, 2, 3, 4) % 7, 0
        for shape, by_truth in product(_MASKS, (False,) if gradient else (True, False)):
            weights = torch.arange(math.prod(shape)).reshape(shape) % 3 + int(not by_truth)
            bias = weights.clamp(max=1 if by_truth else 3).double().log().requires_grad_()
            mask = weights.bool() if by_truth else bias.detach().float()
            leaf = mask.to(device).requires_grad_(gradient)
            found = functional.scaled_dot_product_attention(queries, keys, values.to(device), leaf)
            right = bias.softmax(-1).expand(2, 2, 3, 4) @ values.double()
            if gradient:
                (found,) = torch.autograd.grad(found, leaf, given.to(device))
                (right,) = torch.autograd.grad(right, bias, given.double())
            wrong += int((found.detach().cpu() - right.detach()).abs().gt(1e-4).sum())
        return torch.tensor(wrong)

    return compute


_SHAPES_OF_BIASES = ((2, 2), (1, 2), (2, 1), (2,))


def _biased(function: Callable[..., Tensor]) -> Compute:
    """Return a computation of half a bias of each shape, which is 10, 20 and so on, and twice a product."""

    def compute(device: torch.device) -> Tensor:
        matrix = torch.tensor(_SQUARE, device=device).reshape(2, 2)
        tens = torch.arange(10.0, 50.0, 10.0, device=device)
        return torch.cat(
            [
                function(tens[: math.prod(shape)].reshape(shape), matrix, matrix, beta=0.5, alpha=2.0).flatten()
                for shape in _SHAPES_OF_BIASES
            ]
        )

    return compute


def _in_batch(bias: Tensor, one: Tensor, other: Tensor, *, beta: float, alpha: float) -> Tensor:
    return torch.baddbmm(bias[None] if bias.dim() > 1 else bias, one[None], other[None], beta=beta, alpha=alpha)


_BIASED: list[float] = [
    *(5 + 14, 10 + 20, 15 + 30, 20 + 44),
    *(5 + 14, 10 + 20, 5 + 30, 10 + 44),
    *(5 + 14, 5 + 20, 10 + 30, 10 + 44),
    *(5 + 14, 10 + 20, 5 + 30, 10 + 44),
]


def _short(x: Tensor) -> Tensor:
    """Return sums of hundreds and products of whole numbers, which are too large for their own dtype."""
    found = []
    for kind, value in ((torch.int8, 100), (torch.uint8, 200), (torch.int16, 30_000), (torch.int32, 2**31 - 1)):
        numbers = torch.full((3,), value, device=x.device, dtype=kind)
        found += [numbers.sum(), numbers.sum(0), *numbers.cumsum(0), numbers[:2].prod(), numbers[:2].cumprod(0)[1]]
        found += [(numbers == value).sum(), numbers.max().long()]
    return torch.stack(found)


def _of_short(value: int) -> list[float]:
    return [3 * value, 3 * value, value, 2 * value, 3 * value, value**2, value**2, 3, value]


def _scattered(x: Tensor) -> Tensor:
    masks = (torch.tensor([False, True]), torch.tensor([[False], [True]]))
    return torch.stack([torch.zeros(2, 2, device=x.device).masked_scatter_(mask.to(x.device), x) for mask in masks])


_NORMS = (1.0, 2.0, math.inf)


def _grown(x: Tensor) -> Tensor:
    x = x.clone()
    x.resize_(2 * len(x))
    return x[: len(x) // 2]


def _grown_memory(x: Tensor) -> Tensor:
    x = x.clone()
    memory = x.untyped_storage()
    memory.resize_(4 * memory.nbytes())
    return x.as_strided((len(x),), (1,))


_ACTIVATIONS = (
    *(functional.relu, functional.relu6, functional.hardtanh, functional.hardswish, functional.hardsigmoid),
    *(functional.leaky_relu, functional.elu, functional.celu, functional.selu, functional.gelu, functional.silu),
    *(functional.mish, functional.softplus, functional.softsign, functional.tanhshrink, functional.logsigmoid),
    *(torch.sigmoid, torch.tanh, torch.square, torch.exp, torch.floor),
)

_16 = torch.float16
_TINY = 2.0**-10  # the gap after 1 in fp16, as a number: the documentation imports this file without torch


def _by_short_views(x: Tensor) -> Tensor:
    """Choose among five numbers by 32-bit indices that have gaps, or are transposed."""
    wide = torch.tensor([[4, 3, 2], [1, 0, 2]], device=x.device).int()
    view, column = wide[:, :-1], wide[:, 0]
    rows = [functional.embedding(each, x[:, None]).flatten() for each in (view, view.t())]
    bags = functional.embedding_bag(view, x[:, None], mode="sum").flatten()
    added = torch.zeros_like(x).index_add(0, column, x[:2] * 0 + torch.tensor([6.0, 5.0], device=x.device))
    return torch.cat([*rows, x[view].flatten(), bags, x.index_select(0, column), added])


_ODD = (_INF, 1.0, _NAN, 1.0)  # two rows of which one number is none


def _rms_norm(x: Tensor) -> Tensor:
    """Normalize a usual row beside one with an infinity and one with NaN; leave out what kernels may do otherwise."""
    leaf = x.reshape(3, 2).requires_grad_()
    normed = functional.rms_norm(leaf, (2,), eps=1e-12)
    (found,) = torch.autograd.grad(normed.sum(), leaf)
    return torch.cat([normed[0], normed[1, :1], normed[2], found[0], found[2]]).detach()


def _transformed(transform: Callable[..., Tensor], back: bool) -> Callable[[Tensor], Tensor]:
    """Transform a usual row beside odd ones, by rows and by columns: sums of all numbers are not finite there."""

    def compute(x: Tensor) -> Tensor:
        found = []
        for dim in (1, 0):
            rows = torch.stack([x.new_tensor([1.0, 2.0, 3.0, 4.0]), *x.reshape(2, 2).repeat(1, 2)])
            rows = torch.fft.rfft(rows) if back else rows
            rows[1:, 0] = x[[0, 2]].to(rows.dtype)
            result = transform(rows if dim else rows.t().contiguous(), dim=dim)
            result = result if dim else result.t()
            result = result.real if result.is_complex() else result
            found += [result[0], result[1:, 0].isfinite().float(), result[2, 0].isnan().float()[None]]
        return torch.cat(found)

    return compute


_TRANSFORMS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "fft": (_transformed(torch.fft.fft, False), [10, -2, -2, -2, 0, 0, 1] * 2),
    "rfft": (_transformed(torch.fft.rfft, False), [10, -2, -2, 0, 0, 1] * 2),
    "ifft": (_transformed(torch.fft.ifft, False), [2.5, -0.5, -0.5, -0.5, 0, 0, 1] * 2),
    "irfft": (_transformed(torch.fft.irfft, True), [1, 2, 3, 4, 0, 0, 1] * 2),
}

KNOWN_ARGUMENTS: dict[str, tuple[Compute, list[float]]] = {
    "indices that are apart": (
        _of_cube(lambda x: x[index(x, 0, 1), :, index(x, 3, 0)]),
        [3, 7, 11, 12, 16, 20],
    ),
    "indices that are apart, behind a dimension": (
        _of_cube(lambda x: x[..., None][:, index(x, 0, 2), :, index(x, 0, 0)]),
        [*range(4), *range(12, 16), *range(8, 12), *range(20, 24)],
    ),
    "writing at indices that are apart": (_of_cube(_written_apart), [0, 1, 2, 4, 5, 6, 18]),
    "gradient of indices that are apart": (_of_cube(_gradient_apart), [11, 11, 11, 33]),
    "a mask beside an index": (_of_cube(lambda x: x[x[:, 0, 0] > 1, index(x, 2, 0)]), [*range(20, 24), *range(12, 16)]),
    "gradient of short indices": (
        gradient(
            lambda x: functional.embedding(index(x, 1, 1, 0, 1).int(), x, padding_idx=0), *_SQUARE[:3], shape=(3, 1)
        ),
        [0, 3, 0],
    ),
    "short indices of a view": (
        of_values(_by_short_views, 0.0, 1.0, 2.0, 3.0, 4.0),
        [*(4, 3, 1, 0), *(4, 1, 3, 0), *(4, 3, 1, 0), *(7, 1), *(4, 1), *(0, 5, 0, 0, 6)],
    ),
    "powers of negative numbers": (
        of_values(lambda x: torch.cat([x**5, x**4, x**-3, x.pow(x.abs()), torch.pow(-2.0, x.abs())]), -2.0, -3.0),
        [*(-32, -243), *(16, 81), *(-1 / 8, -1 / 27), *(4, -27), *(4, -8)],
    ),
    "powers of whole numbers": (
        of_values(
            lambda x: torch.cat([x[:4].long() ** x[4:].long(), x[:4].int() ** x[4:].int()]),
            *(1.0, -1.0, -1.0, 2.0, -3.0, -2.0, -3.0, -1.0),
        ),
        [1, 1, -1, 0] * 2,
    ),
    "scattering by masks of rows and columns": (of_values(_scattered, *_SQUARE), [*(0, 1, 0, 2), *(0, 0, 1, 2)]),
    "gradient of powers of negative numbers": (gradient(lambda x: x**5 + x**-1, -2.0, -1.0), [79.75, 4]),
    "activations of NaN": (
        of_values(lambda x: torch.stack([f(x) for f in _ACTIVATIONS]), _NAN),
        [_NAN] * len(_ACTIVATIONS),
    ),
    "activations with bounds": (
        of_values(
            lambda x: torch.cat([f(x) for f in (functional.relu6, functional.hardtanh, functional.hardsigmoid)]),
            *(-5.0, -1.5, 1.5, 9.0),
        ),
        [*(0, 0, 1.5, 6), *(-1, -1, 1, 1), *(0, 0.25, 0.75, 1)],
    ),
    "gradient of activations with bounds": (
        gradient(lambda x: functional.relu6(x) + 10 * functional.hardtanh(x, -2.0, 3.0), -5.0, -1.5, 1.5, 9.0),
        [0, 10, 11, 0],
    ),
    "sums of fp16 in fp32": (
        _low(_16, lambda x: x.reshape(2, 2).sum(0, dtype=torch.float32), *[6e4] * 4),
        [1.2e5, 1.2e5],
    ),
    "mean of fp16 in fp32": (_low(_16, lambda x: x.mean(0, dtype=torch.float32), 1, 1 + _TINY), [1 + _TINY / 2]),
    "product of fp16 in fp32": (_low(_16, lambda x: x.prod(dtype=torch.float32), 6e4, 3.0), [1.8e5]),
    "running sum of fp16 in fp32": (_low(_16, lambda x: x.cumsum(0, dtype=torch.float32), 6e4, 6e4), [6e4, 1.2e5]),
    "norm of fp16 in fp32": (
        _low(_16, lambda x: torch.linalg.vector_norm(x, dtype=torch.float32), 4.8e4, 6.4e4),
        [8e4],
    ),
    "softmax of bf16 in fp32": (
        _low(torch.bfloat16, lambda x: x.softmax(0, dtype=torch.float32), 0, 1),
        [1 / (1 + _E), _E / (1 + _E)],
    ),
    "log_softmax of bf16 in fp32": (
        _low(torch.bfloat16, lambda x: x.log_softmax(0, dtype=torch.float32), 0, 1),
        [-math.log(1 + _E), 1 - math.log(1 + _E)],
    ),
    "statistics of bf16 in fp32": (_statistics(torch.bfloat16), [1 + 2.0**-8]),
    "statistics of fp16 in fp32": (_statistics(_16), [1 + _TINY / 2]),
    "gradients of fp32 weights that normalize bf16": (_gradients_of_statistics, [257, 257]),
    "attention of grouped heads": (lambda device: _grouped(device)[0], [1, 1, 2, 2]),
    "gradient of attention of grouped heads": (_gradient_of_grouped, [11, 1100]),
    "attention by masks of every shape": (_attention_by_masks(gradient=False), [0]),
    "gradient of masks of every shape": (_attention_by_masks(gradient=True), [0]),
    "addmm with biases": (_biased(torch.addmm), _BIASED),
    "baddbmm with biases": (_biased(_in_batch), _BIASED),
    "sums of short whole numbers": (
        of_values(_short, 0.0),
        [number for value in (100, 200, 30_000, 2**31 - 1) for number in _of_short(value)],
    ),
    "norms of several orders": (
        of_values(
            lambda x: torch.stack([torch.linalg.vector_norm(x, each) for each in (*_NORMS, -math.inf, 0.0)]), -3.0, 4.0
        ),
        [7, 5, 4, 3, 2],
    ),
    "norms of NaN": (
        of_values(lambda x: torch.stack([torch.linalg.vector_norm(x, each) for each in _NORMS]), 1.0, _NAN),
        [_NAN] * 3,
    ),
    "places of equal numbers": (
        of_values(lambda x: torch.stack([x.argmin(), x.argmin(0), (-x).argmax(), (-x).argmax(0)]), 2.0, 0.0, 1.0, 0.0),
        [1, 1, 1, 1],
    ),
    "smallest so far": (
        of_values(lambda x: torch.cat([x.cummin(0)[0], (-x).cummax(0)[0], x.aminmax()[0][None]]), 2.0, 3.0, -1.0, 0.0),
        [*(2, 2, -1, -1), *(-2, -2, 1, 1), -1],
    ),
    "reductions that leave NaN out": (
        of_values(
            lambda x: torch.stack([x.nansum(), x.nanmean(), x.nanmedian(), torch.fmax(x, x[:1])[1]]), 1.0, _NAN, 3.0
        ),
        [4, 2, 1, 1],
    ),
    "rms_norm beside infinity and NaN": (
        of_values(_rms_norm, 1.0, 7.0, *_ODD),
        [*(0.2, 1.4), *[_NAN] * 3, *(0.168, -0.024), *[_NAN] * 2],
    ),
    **{
        f"{name} beside infinity and NaN": (of_values(transform, *_ODD), expected)
        for name, (transform, expected) in _TRANSFORMS.items()
    },
    "cdist to infinity and NaN": (
        of_values(
            lambda x: torch.cat(
                [
                    torch.cdist(x.reshape(3, 2), x[:2].reshape(1, 2) - x.new_tensor([3.0, 4.0]), p).flatten()
                    for p in (1.0, 2.0)
                ]
            ),
            *(1.0, 7.0, *_ODD),
        ),
        [*(7, _INF, _NAN), *(5, _INF, _NAN)],
    ),
    "unpooling of infinity and NaN": (
        of_values(
            lambda x: functional.max_unpool1d(
                x[None, None, [2, 0, 1]], index(x, 0, 3, 4)[None, None], [2], output_size=[6]
            ),
            *_ODD,
        ),
        [_NAN, 0, 0, _INF, 1, 0],
    ),
    "a tensor that grows": (of_values(_grown, *_SQUARE), _SQUARE),
    "memory that grows": (of_values(_grown_memory, *_SQUARE), _SQUARE),
}
"""Computations on a device by name, and the numbers that they give in order."""
