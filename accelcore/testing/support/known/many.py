"""Known results of many tensors, many elements and large whole numbers, where a kernel may change its way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 70_000  # more than a grid of 65,535 blocks has
_LONG = 2**18  # also sums of 256 numbers each are too many for bf16 to add up
_LARGE = 2**24  # the next whole number is none in fp32
_HUGE = 2**53  # nor in float64
_TENSORS = 300  # more than the arguments of a kernel's launch hold


Compute = Callable[[torch.device], Tensor]


def _whole(*values: int) -> Compute:
    return lambda device: torch.tensor(values, device=device)


def _range(device: torch.device) -> Tensor:
    return torch.arange(_ROWS, device=device)


def _ones(count: int, dtype: torch.dtype = torch.float32) -> Compute:
    return lambda device: torch.ones(count, device=device, dtype=dtype)


def _cubes(device: torch.device) -> Tensor:
    return torch.ones(_ROWS, 1, 1, device=device)


def _images(device: torch.device) -> Tensor:
    return torch.ones(_ROWS, 1, 1, 2, device=device)


def _gradient_of_kernel(images: Tensor) -> Tensor:
    kernel = images[:1].clone().requires_grad_()
    (found,) = torch.autograd.grad(functional.conv2d(images, kernel).sum(), kernel)
    return found


def _of(make: Compute, function: Callable[[Tensor], Tensor]) -> Compute:
    return lambda device: function(make(device))


def _compared(x: Tensor) -> Tensor:
    """Compare two numbers with the first one, as a number and as a tensor, by each operator."""
    first = int(x[0])
    by_number = [x > first, x <= first, x == x[:1]]
    return torch.cat([*by_number, x != first, x > x[:1], x[1:] == first])


def _rows_by_ones(x: Tensor) -> Tensor:
    rows = x.view(100, 700)[:17] + _LARGE
    return (rows @ torch.ones_like(rows).t() - 700 * _LARGE)[::16, 16]


def _gradient_of_embedding(x: Tensor) -> Tensor:
    """Return elements of the gradient of an embedding of many rows, of which the last is read twice, and their sum."""
    weight, rows = x.float()[:, None].requires_grad_(), x[[0, 2**16 - 1, 2**16, -1, -1]]
    (found,) = torch.autograd.grad(
        functional.embedding(rows, weight),
        weight,
        rows.new_tensor([[1.0], [2.0], [3.0], [4.0], [5.0]], dtype=weight.dtype),
    )
    return torch.cat([found[rows[:-1], 0], found.sum()[None]])


def _alternating(device: torch.device) -> Tensor:
    """Return 17 rows of -1 and 1 in turn, of which a sum that misses a number or has one twice is another one."""
    row = 1 - 2 * (torch.arange(_ROWS + 1, device=device) % 2)
    return row.float().expand(17, -1).contiguous()


def _of_planes(device: torch.device) -> Tensor:
    """Return planes of -1 and 1, which is what normalizing makes of them."""
    return torch.tensor([-1.0, 1.0], device=device).repeat(_ROWS, 1)


def _of_weights(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Compute:
    """Return a computation of the gradients of a function's weights and biases, which are 1.

    They are those of the sum of squares of its results plus 2, on many rows: no term is near 0, where rounding counts.
    """

    def compute(device: torch.device) -> Tensor:
        leaves = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
        found = torch.autograd.grad(function(_of_planes(device), *leaves).add(2).square().sum(), leaves)
        return torch.cat([each.flatten() for each in found])

    return compute


def _many(device: torch.device) -> list[Tensor]:
    """Return tensors of many sizes from 0 elements on, each filled with its number, of which some have gaps."""
    return [torch.full((2 * (n % 100),), float(n), device=device)[:: 1 + n % 100 // 90] for n in range(_TENSORS)]


def _columns(device: torch.device) -> list[Tensor]:
    return [torch.full((2, 1), float(n), device=device) for n in range(_TENSORS)]


def _hidden(x: Tensor) -> Tensor:
    """Return a mask of a long run, beside which 4,300 of many numbers are left."""
    return (x >= 300) & (x < _ROWS - 4000)


def _loss_of_the_rest(x: Tensor) -> Tensor:
    rows = torch.zeros(_ROWS, 2, device=x.device, requires_grad=True)
    loss = functional.cross_entropy(rows, x.mul(0).masked_fill(_hidden(x), -100))
    (found,) = torch.autograd.grad(loss, rows)
    return torch.cat([loss.exp()[None], found.mul(8600)[[0, 300, -1], 1]])


def _softmax_of_the_rest(x: Tensor) -> Tensor:
    rows = x.mul(0.0).masked_fill(_hidden(x), -torch.inf)
    return torch.cat([rows.softmax(0)[[0, 300, -1]] * 4300, rows.logsumexp(0).exp()[None]])


def _attention_to_the_rest(x: Tensor) -> Tensor:
    hidden = _hidden(x)
    values = hidden.float().add(1)[None, None, :, None]
    return functional.scaled_dot_product_attention(values[:, :, :1], values.mul(0), values, ~hidden[None])


def _of_columns(x: Tensor) -> Tensor:
    """Return places of the first and last number in order, along a dimension whose elements are not neighbours."""
    columns = x.float()[:, None].repeat(1, 2).neg()
    orders = columns.sort(0)[1], columns.argsort(0), columns.topk(5_000, 0, largest=False)[1]
    return torch.cat([*(each[[0, 1, 4_999], 1] for each in orders), columns.argmin(0)[1:]]) - _ROWS


def _product(kind: torch.dtype, x: Tensor) -> Tensor:
    return (x[:70] % 2 + 1).to(kind).prod()


def _sums(number: int, ones: Tensor) -> Tensor:
    x = ones * number
    columns = x[:, None].expand(-1, 2)
    return torch.stack([x.sum(), x.nansum(), x.cumsum(0)[-1], columns.sum(0)[1], columns.cumsum(0)[-1, 1]])


_WHOLE: dict[str, tuple[Callable[[int, Tensor], Tensor], list[float]]] = {
    "addition": (
        lambda base, x: torch.cat([x + 1 - base, x - x.flip(0), x.clone().add_(x) - 2 * base]),
        [2, 4, -2, 2, 2, 6],
    ),
    "product": (
        lambda base, x: (
            torch.cat([x * 3, 3 * x.clone(), x * (x - base + 2).clamp(max=3), x.clone().mul_(3)]) - 3 * base
        ),
        [3, 9] * 4,
    ),
    "multiple": (lambda base, x: torch.addcmul(x, x, x - x + 2) - 3 * base, [3, 9]),
    "quotient": (
        lambda base, x: torch.cat([x // 1, x // (x - x + 1), x.div(1, rounding_mode="trunc")]) - base,
        [1, 3] * 3,
    ),
    "remainder": (lambda base, x: torch.cat([x % 2, x % base, x.fmod(2), x & 3]), [1, 1, 1, 3, 1, 1, 1, 3]),
    "bounds": (
        lambda base, x: torch.cat([x.clamp(base + 2, base + 2), torch.maximum(x, x.flip(0)), x.neg().abs()]) - base,
        [2, 2, 3, 3, 1, 3],
    ),
    "largest": (lambda base, x: torch.stack([x.max(), x.amax(0), x.min(), x.sort()[0][1]]) - base, [3, 3, 1, 3]),
    "order": (lambda base, x: torch.cat([x.argsort(descending=True), x.topk(1)[1], x.argmax(0)[None]]), [1, 0, 1, 1]),
    "choice": (
        lambda base, x: (
            torch.cat([x[x - base - 1 > 0], x.where(x > base + 1, base), x.gather(0, (x - base) // 3)]) - base
        ),
        [3, 0, 3, 1, 3],
    ),
    "writing": (
        lambda base, x: (
            torch.cat([x.masked_fill(x > base + 1, base + 5), x.index_fill(0, x[:1] - base, base + 7)]) - base
        ),
        [1, 5, 1, 7],
    ),
}
"""Computations of two whole numbers, which are larger by 1 and 3 than the one that they are given."""

_KINDS = {torch.bool: 1, torch.uint8: 255, torch.int8: -128, torch.int16: -(2**15), torch.int32: 2**20}
"""A number of each kind, of which many have a sum in int64 alone."""

_LOW = (torch.bfloat16, torch.float16)
_ALONG: dict[str, tuple[Callable[[Tensor, int], Tensor], float]] = {
    "sum": (lambda x, along: x.sum(along), 2**15),
    "sum without NaN": (lambda x, along: x.nansum(along), 2**15),
    "mean": (lambda x, along: x.mean(along), 1 / 8),
    "norm": (lambda x, along: torch.linalg.vector_norm(x, dim=along), 64),
    "norm of order 1": (lambda x, along: torch.linalg.vector_norm(x, 1, along), 2**15),
    "running sum": (lambda x, along: x.cumsum(along).select(along, -1), 2**15),
    "gradient of addition": (lambda x, along: _of_one(torch.add, x, along), 2**15),
    "gradient of multiplication": (lambda x, along: _of_one(torch.mul, x, along), 2**12),
}
"""Sums of 2**18 numbers of 1/8 along a dimension, and what they are."""
_FORMS = {"rows": ((2, _LONG), 1), "columns": ((_LONG, 2), 0), "planes": ((2, _LONG, 2), 1)}


def _of_one(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, along: int) -> Tensor:
    """Return the gradient of an operand of which each number is used for all along a dimension, weighted by `x`."""
    one = torch.ones_like(x.narrow(along, 0, 1)).requires_grad_()
    (found,) = torch.autograd.grad(function(x, one), one, x)
    return found


def _sums_along(what: Callable[[Tensor, int], Tensor], form: str, dtype: torch.dtype) -> Compute:
    shape, along = _FORMS[form]
    return lambda device: what(torch.full(shape, 1 / 8, device=device, dtype=dtype), along).unique()


KNOWN_MANY: dict[str, tuple[Compute, list[float]]] = {
    "sum of bf16": (_of(_ones(_LONG, torch.bfloat16), lambda x: x.sum()), [_LONG]),
    "running sum of bf16": (_of(_ones(_LONG, torch.bfloat16), lambda x: x.cumsum(0)[-1]), [_LONG]),
    "norm of bf16": (_of(_ones(_LONG, torch.bfloat16), torch.linalg.vector_norm), [512]),
    "product of long rows of bf16": (_of(_ones(_LONG, torch.bfloat16), lambda x: x[None] @ x[:, None]), [_LONG]),
    **{
        f"{name} along long {form} of {str(dtype).removeprefix('torch.')}": (_sums_along(what, form, dtype), [expected])
        for (name, (what, expected)), form, dtype in product(_ALONG.items(), _FORMS, _LOW)
    },
    **{
        f"{name} of {word}whole numbers": (_of(_whole(base + 1, base + 3), partial(compute, base)), expected)
        for word, base in (("", _LARGE), ("larger ", _HUGE))
        for name, (compute, expected) in _WHOLE.items()
    },
    "comparison of whole numbers": (_of(_whole(_LARGE, _LARGE + 1), _compared), [*(0, 1), *(1, 0) * 2, *(0, 1) * 2, 0]),
    "comparison of larger whole numbers": (
        _of(_whole(_HUGE, _HUGE + 1), _compared),
        [*(0, 1), *(1, 0) * 2, *(0, 1) * 2, 0],
    ),
    "whole numbers of fractions": (
        lambda device: torch.tensor([3e9, -3e9, 2.0**40], device=device).long() // 2**30,
        [2, -3, 1024],
    ),
    "truth of whole numbers": (_of(_whole(256, 2**32, 0), lambda x: x.bool()), [1, 1, 0]),
    "range of whole numbers": (lambda device: torch.arange(_LARGE, _LARGE + 3, device=device) - _LARGE, [0, 1, 2]),
    "concatenation of many tensors": (
        lambda device: torch.cat(_many(device)),
        [n for n in range(_TENSORS) for _ in range(2 * (n % 100) // (1 + n % 100 // 90))],
    ),
    "concatenation of many columns": (lambda device: torch.cat(_columns(device), 1)[0], [*range(_TENSORS)]),
    "stack of many tensors": (lambda device: torch.stack(_columns(device), 2)[0], [*range(_TENSORS)]),
    "sums of many rows": (_of(_ones(_ROWS), lambda x: x.expand(3, -1).t().sum(1)[[0, -1]]), [3, 3]),
    "softmax of many rows": (_of(_ones(_ROWS), lambda x: x.expand(2, -1).t().softmax(1)[-1]), [0.5, 0.5]),
    "products of many matrices": (_of(_cubes, lambda x: torch.bmm(x, x).sum()), [_ROWS]),
    "attention of many rows": (_of(_cubes, lambda x: functional.scaled_dot_product_attention(x, x, x).sum()), [_ROWS]),
    "convolution of many images": (_of(_images, lambda x: functional.conv2d(x, x[:1]).sum()), [2 * _ROWS]),
    "gradient of a convolution of many images": (_of(_images, _gradient_of_kernel), [_ROWS, _ROWS]),
    "gradients of layer_norm over many rows": (
        _of_weights(lambda x, weight, bias: functional.layer_norm(x, (2,), weight, bias, eps=1e-12), (2,), (2,)),
        [-4 * _ROWS, 8 * _ROWS, 4 * _ROWS, 8 * _ROWS],
    ),
    "gradients of layer_norm over many planes": (
        _of_weights(
            lambda x, weight, bias: functional.layer_norm(x[..., None], (2, 1), weight, bias, eps=1e-12), (2, 1), (2, 1)
        ),
        [-4 * _ROWS, 8 * _ROWS, 4 * _ROWS, 8 * _ROWS],
    ),
    "gradients of rms_norm over many rows": (
        _of_weights(lambda x, weight: functional.rms_norm(x, (2,), weight, eps=1e-12), (2,)),
        [-2 * _ROWS, 6 * _ROWS],
    ),
    "gradients of group_norm over many images": (
        _of_weights(lambda x, weight, bias: functional.group_norm(x[:, None], 1, weight, bias, eps=1e-12), (1,), (1,)),
        [4 * _ROWS, 12 * _ROWS],
    ),
    "gradients of batch_norm over many rows": (
        _of_weights(
            lambda x, weight, bias: functional.batch_norm(
                x.reshape(-1, 1), None, None, weight, bias, training=True, eps=1e-12
            ),
            (1,),
            (1,),
        ),
        [4 * _ROWS, 12 * _ROWS],
    ),
    "gradients of a layer over many rows": (
        _of_weights(functional.linear, (1, 2), (1,)),
        [-6 * _ROWS, 6 * _ROWS, 6 * _ROWS],
    ),
    "gradient of prelu over many rows": (_of_weights(functional.prelu, (2,)), [-2 * _ROWS, 0]),
    "gradient of one row of an embedding": (
        _of_weights(lambda x, weight: functional.embedding(x[:, 1].long(), weight), (2, 1)),
        [0, 6 * _ROWS],
    ),
    "pools of many images": (_of(_images, lambda x: functional.max_pool2d(x, (1, 2)).sum()), [_ROWS]),
    "upsampling of many images": (_of(_images, lambda x: functional.interpolate(x, (1, 4)).sum()), [4 * _ROWS]),
    "products of long rows": (
        _of(_alternating, lambda x: torch.stack([x @ x.abs().t(), (x[None] @ x.abs().t()[None])[0]]).flatten()),
        [1.0] * 2 * 17**2,
    ),
    "product of matrices of whole numbers": (
        _of(_range, _rows_by_ones),
        [700**2 * row + 700 * 699 / 2 for row in (0, 16)],
    ),
    **{
        f"product of many {kind}": (_of(_range, partial(_product, kind)), [2**35])
        for kind in [*_KINDS, torch.int64]
        if kind != torch.bool
    },
    "rows of a long embedding": (
        _of(_range, lambda x: functional.embedding(x[[0, 2**16 - 1, 2**16, -1]], x.float()[:, None])),
        [0, 2**16 - 1, 2**16, _ROWS - 1],
    ),
    "gradient of rows of a long embedding": (_of(_range, _gradient_of_embedding), [1, 2, 3, 9, 15]),
    "running sum of many": (_of(_ones(_ROWS), lambda x: x.cumsum(0)[-1]), [_ROWS]),
    **{
        f"sums of many {kind}": (_of(_ones(_ROWS, kind), partial(_sums, one)), [one * _ROWS] * 5)
        for kind, one in _KINDS.items()
    },
    "place of the largest of many": (_of(_range, torch.argmax), [_ROWS - 1]),
    "largest 64 of many": (_of(_range, lambda x: x.float().topk(64)[1][[0, 31, 32, 63]] - _ROWS), [-1, -32, -33, -64]),
    "order of many": (_of(_range, lambda x: x.neg().sort()[1][[0, -1]]), [_ROWS - 1, 0]),
    "order of many in columns": (_of(_range, _of_columns), [*[-1, -2, -5_000] * 3, -1]),
    "row of many": (_of(_range, lambda x: x.float()[:, None].index_select(0, x[-1:])), [_ROWS - 1]),
    "loss that ignores a long run": (_of(_range, _loss_of_the_rest), [2, 1, 0, 1]),
    "softmax that leaves a long run out": (_of(_range, _softmax_of_the_rest), [1, 0, 1, 4300]),
    "attention that leaves a long run out": (_of(_range, _attention_to_the_rest), [1]),
    "choice that leaves a long run out": (_of(_range, lambda x: x[~_hidden(x)][[299, 300]]), [299, _ROWS - 4000]),
    "gradient of an embedding that pads a long run": (
        _of_weights(lambda x, weight: functional.embedding((~_hidden(_range(x.device))).long(), weight, 0), (2, 1)),
        [0, 6 * 4300],
    ),
    "sum into one row of many": (
        _of(_ones(_ROWS), lambda x: torch.zeros(2, device=x.device).index_add(0, x.long(), x)),
        [0, _ROWS],
    ),
}
"""Computations on a device by name, and the numbers that they give in order."""
