"""Known results of arguments in forms that a kernel may not expect: narrow indices, odd strides, ties far apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from accelcore.testing.support.known.values import Compute, of_values

_MANY = 70_000
_CHOSEN = 5_000  # more than a block of threads orders
_TIES = ((5, 40_000, _MANY - 1), (3_000, 4_097, 65_536))  # where a row has its largest number


def _narrow(function: Callable[[Tensor, int, Tensor], Tensor]) -> Compute:
    """Return a computation with an index that is smaller than the tensor in both dimensions, along each of them."""

    def compute(device: torch.device) -> Tensor:
        index = torch.tensor([[2, 0], [1, 2]], device=device)
        numbers = torch.arange(12.0, device=device).view(3, 4)
        return torch.cat([function(numbers, dim, index).flatten() for dim in (0, 1)])

    return compute


def _gradient_of_gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(x.requires_grad_().gather(dim, index), x, x.detach()[:2, :2] + 1)
    return found


_GATHERED = [*(8.0, 1.0, 4.0, 9.0), *(2.0, 0.0, 5.0, 6.0)]
_SCATTERED = [*(0.0, 2.0, 0.0, 0.0), *(5.0, 0.0, 0.0, 0.0), *(1.0, 6.0, 0.0, 0.0)]
_SCATTERED += [*(2.0, 0.0, 1.0, 0.0), *(0.0, 5.0, 6.0, 0.0), *[0.0] * 4]
_WRITES: dict[str, Callable[[Tensor, int, Tensor], Tensor]] = {
    "scatter": lambda x, dim, index: torch.zeros_like(x).scatter(dim, index, x + 1),
    "scatter_add": lambda x, dim, index: torch.zeros_like(x).scatter_add(dim, index, x + 1),
    "scatter_reduce": lambda x, dim, index: torch.zeros_like(x).scatter_reduce(dim, index, x + 1, "amax"),
    "gradient of gather": _gradient_of_gather,
}


def _repeated(x: Tensor) -> Tensor:
    """Repeat five numbers and rows by counts of which some are 0, and return a gradient of it, too."""
    counts = torch.tensor([2, 0, 1, 3, 0], device=x.device)
    leaf = x.float().requires_grad_()
    again = [leaf.repeat_interleave(counts), leaf[:, None].repeat_interleave(counts, 0, output_size=6)[:, 0]]
    (found,) = torch.autograd.grad(torch.stack(again).sum(), leaf)
    return torch.cat([*again, found, torch.repeat_interleave(counts).float()]).detach()


def _first_of(choose: Callable[[Tensor, int], Tensor], dtype: str) -> Compute:
    """Return a computation of the places of the largest numbers in long rows and columns, each of which comes again."""

    def compute(device: torch.device) -> Tensor:
        rows = torch.zeros(len(_TIES), _MANY, device=device, dtype=getattr(torch, dtype))
        for row, places in zip(rows, _TIES, strict=True):
            row[torch.tensor(places, device=device)] = 1
        return torch.cat([choose(rows, 1), choose(rows.t().contiguous(), 0)])

    return compute


_FIRST: dict[str, Callable[[Tensor, int], Tensor]] = {
    "argmax": torch.argmax,
    "max": lambda x, dim: x.max(dim)[1],
    "argmin": lambda x, dim: x.neg().argmin(dim),
    "min": lambda x, dim: x.neg().min(dim)[1],
    "stable sort": lambda x, dim: x.sort(dim=dim, descending=True, stable=True)[1].select(dim, 0),
}


def _ordered(order: Callable[[Tensor], Tensor]) -> Compute:
    """Return a computation that orders many whole numbers, and adds up how far each step is from 1."""

    def compute(device: torch.device) -> Tensor:
        found = order((torch.arange(_MANY, device=device) * 31 % _MANY).float())
        return torch.stack([found[0], found[-1], found.diff().abs().sub(1).abs().sum()])

    return compute


_LAST, _LEAST = float(_MANY - 1), float(_CHOSEN - 1)
_ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "topk": (lambda x: x.topk(_CHOSEN)[0], [_LAST, _MANY - _CHOSEN, 0]),
    "topk, the least": (lambda x: x.topk(_CHOSEN, largest=False)[0], [0, _LEAST, 0]),
    "places of topk": (lambda x: x[x.topk(_CHOSEN)[1]], [_LAST, _MANY - _CHOSEN, 0]),
    "sort": (lambda x: x.sort()[0], [0, _LAST, 0]),
    "argsort": (lambda x: x[x.argsort(descending=True)], [_LAST, 0, 0]),
    "unique": (torch.unique, [0, _LAST, 0]),
    "kthvalue and median": (
        lambda x: torch.stack(
            [x.kthvalue(_CHOSEN)[0], x.median() - (_MANY // 2 - _CHOSEN), x.median(0)[0] - _LAST // 2]
        ),
        [_LEAST, 0, _LEAST],
    ),
}


def _of_single(function: Callable[[Tensor], Tensor], *, keeps: bool = False) -> Compute:
    """Return a computation of images whose dimensions of one element have any stride: how far it is from the right one.

    That is the image itself for what `keeps` it, and otherwise what the function makes of it in usual strides.
    """

    def compute(device: torch.device) -> Tensor:
        found = []
        for shape, strides in _SINGLE:
            plain = torch.arange(24.0, device=device).sin().view(shape)
            right = plain if keeps else function(plain)
            found.append((function(plain.as_strided(shape, strides)) - right).abs().max())
        return torch.stack(found)

    return compute


_SINGLE = (
    ((2, 1, 3, 4), (12, 1, 4, 1)),  # the strides of channels-last, too
    ((2, 1, 3, 4), (12, 999, 4, 1)),
    ((1, 2, 3, 4), (7, 12, 4, 1)),
    ((2, 3, 4, 1), (12, 4, 1, 5)),
    ((2, 3, 1, 4), (12, 4, 4, 1)),
)


def _beside_channels_last(x: Tensor) -> Tensor:
    pair = torch.cat([x + 1, x + 2], 1).contiguous(memory_format=torch.channels_last)
    return torch.cat([pair, x, pair], 1)[:, 2 * x.shape[1] : 3 * x.shape[1]]


_KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda x: torch.cat([x, x], 1)[:, x.shape[1] :],
    "cat beside channels-last": _beside_channels_last,
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous().view(-1).view(x.shape),
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last).flatten().view(x.shape),
    "copy_": lambda x: torch.zeros(x.shape, device=x.device).copy_(x),
    "copy_ into it": lambda x: torch.empty_like(x).copy_(x.flip(3)).flip(3),
    "addition to channels-last": lambda x: x + torch.zeros_like(x).contiguous(memory_format=torch.channels_last),
}
_ON_SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1) + x.softmax(3),
    "sum": lambda x: x.sum((0, 2)),
    "mm": lambda x: x[0, 0] @ x[-1, -1].t(),
    "bmm": lambda x: x[:, 0] @ x[:, 0].mT,
    "linear": lambda x: functional.linear(x, x[0, 0].detach()),
    "conv2d": lambda x: functional.conv2d(x, x[:1].detach()),
    "weight of conv2d": lambda x: functional.conv2d(torch.ones_like(x).contiguous(), x[:1]),
    "max_pool2d": lambda x: functional.max_pool2d(x, (1, 1), (1, 2)),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2.0),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: functional.group_norm(x, 1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[2:]),
}


def _by_number(function: Callable[[Tensor, float], Tensor]) -> Compute:
    """Return a computation of numbers in bf16 with one that bf16 would round, whose result is another one then."""
    return lambda device: function(torch.tensor([-1.0, 1.75], device=device, dtype=torch.bfloat16), _BETWEEN)


_GAP = 2.0**-7  # after 1, in bf16
_BETWEEN = 1 + _GAP / 2 + _GAP / 32


def _wide(x: Tensor, number: float) -> Tensor:
    """Return a number in fp32 on the device of `x`."""
    return torch.full((), number, device=x.device)


def _by_wide_in_place(x: Tensor, number: float) -> Tensor:
    torch._foreach_mul_([x], _wide(x, number))
    return x


_BY_TENSORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "": lambda x, number: x * _wide(x, number),
    "in place": lambda x, number: x.mul_(_wide(x, number)),
    "of lists": lambda x, number: torch._foreach_mul([x], _wide(x, number))[0],
    "of lists in place": _by_wide_in_place,
}
_BY_NUMBERS: dict[str, tuple[Callable[[Tensor, float], Tensor], list[float]]] = {
    "multiplication": (lambda x, number: x * number, [-1 - _GAP, 1.75 + _GAP]),
    "multiplication in place": (lambda x, number: x.mul_(number), [-1 - _GAP, 1.75 + _GAP]),
    "multiplication of lists": (lambda x, number: torch._foreach_mul([x], number)[0], [-1 - _GAP, 1.75 + _GAP]),
    "multiplication of lists, of each": (
        lambda x, number: torch._foreach_mul([x], [number])[0],
        [-1 - _GAP, 1.75 + _GAP],
    ),
    **{
        f"multiplication {how} by a tensor, that is,": (multiply, [-1 - _GAP, 1.75 + _GAP])
        for how, multiply in _BY_TENSORS.items()
    },
    "division": (lambda x, number: x / number, [-1 + _GAP / 2, 1.75 - _GAP]),
    "division by a tensor, that is,": (lambda x, number: x / _wide(x, number), [-1 + _GAP / 2, 1.75 - _GAP]),
    "division of lists by a tensor, that is,": (
        lambda x, number: torch._foreach_div([x], _wide(x, number))[0],
        [-1 + _GAP / 2, 1.75 - _GAP],
    ),
}


def _of_wide_weights(normalize: Callable[..., Tensor], dtype: str) -> Compute:
    """Return a computation of what normalizes -1 and 1 in low precision by weights and biases in fp32, which cancel."""

    def compute(device: torch.device) -> Tensor:
        kind = getattr(torch, dtype)
        weight = torch.full((2,), 1 + torch.finfo(kind).eps / 2, device=device)
        rows = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], device=device, dtype=kind)
        try:
            return normalize(rows, weight, torch.full_like(weight, -1.0))[1, 0] / torch.finfo(kind).eps
        except RuntimeError as error:
            if "expected scalar type" not in str(error):
                raise
            raise NotImplementedError(f"the weights have to be in {kind}: {error}") from error

    return compute


def _evaluated(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalize by a running mean that low precision cannot hold: 1 by weight and variance 1 is half a gap below 0."""
    return -functional.batch_norm(rows, weight, torch.ones_like(weight), eps=1e-12)


_NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x, weight, bias: functional.layer_norm(x, (2,), weight, bias, 1e-12),
    "group_norm": lambda x, weight, bias: functional.group_norm(x, 1, weight, bias, 1e-12),
    "batch_norm": lambda x, weight, bias: functional.batch_norm(x, None, None, weight, bias, training=True, eps=1e-12),
    "batch_norm in evaluation": lambda x, weight, bias: functional.batch_norm(
        x, torch.zeros_like(bias), torch.ones_like(bias), weight, bias, eps=1e-12
    ),
    "batch_norm by running statistics": _evaluated,
}


def _medians(x: Tensor) -> Tensor:
    """Return medians of rows that share memory: of all, and of each row; torch's own kernel is wrong of columns."""
    rows = x.expand(3, -1)
    return torch.stack(
        [rows.median(), rows.nanmedian(), *rows.median(1)[0], *rows.nanmedian(1)[0], rows.median(1)[1][2]]
    )


KNOWN_FORMS: dict[str, tuple[Compute, list[float]]] = {
    "repetition by counts of 0": (
        of_values(_repeated, *range(10, 15)),
        [*(10, 10, 12, 13, 13, 13) * 2, *(4, 0, 2, 6, 0), *(0, 0, 2, 3, 3, 3)],
    ),
    "medians of expanded memory": (of_values(_medians, 5.0, 9.0, 6.0, 8.0, 7.0), [*[7] * 8, 4]),
    "gather by a narrow index": (_narrow(lambda x, dim, index: x.gather(dim, index)), _GATHERED),
    **{f"{name} by a narrow index": (_narrow(write), _SCATTERED) for name, write in _WRITES.items()},
    **{
        f"{name} of equal numbers in long rows, {dtype}": (_first_of(choose, dtype), [5, 3000] * 2)
        for name, choose in _FIRST.items()
        for dtype in ("float32", "int64")
    },
    **{f"{name} of many": (_ordered(order), expected) for name, (order, expected) in _ORDERS.items()},
    **{
        f"{name} of single elements in any strides": (_of_single(function), [0.0] * len(_SINGLE))
        for name, function in _ON_SINGLE.items()
    },
    **{
        f"{name} of single elements in any strides": (_of_single(function, keeps=True), [0.0] * len(_SINGLE))
        for name, function in _KEEPING.items()
    },
    **{
        f"{name} by a number that bf16 cannot hold": (_by_number(function), expected)
        for name, (function, expected) in _BY_NUMBERS.items()
    },
    **{
        f"{name} of {dtype} with weights in fp32": (_of_wide_weights(normalize, dtype), [0.5])
        for name, normalize in _NORMS.items()
        for dtype in ("bfloat16", "float16")
    },
}
"""Computations on a device by name, and the numbers that they give in order."""
