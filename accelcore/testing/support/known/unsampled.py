"""Known results of arguments that torch's samples lack: large matrices, none at all, long ranges, complex zeros, ties.

Also of operators without samples, and of numbers that depend on the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcore.testing.support.known.values import Compute, gradient, index, of_values

_SIZE = 66  # rows, more than the tiles that kernels take
_CLOSE = 1e-4  # of the largest number: more than a decomposition in fp32 loses by rounding
_INF, _NAN = math.inf, math.nan
_AT_LIMITS = int(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14))  # torch 2.14 changed clamp's gradient


def _matrices(device: torch.device) -> Tensor:
    """Return matrices of which each takes other pivots: its largest elements lie elsewhere."""
    generator = torch.Generator().manual_seed(5)
    largest = [_SIZE * torch.eye(_SIZE).roll(count, 0) for count in (1, 20, 45)]
    return (torch.stack(largest) + torch.randn(3, _SIZE, _SIZE, generator=generator)).to(device)


def _triangles(a: Tensor) -> Tensor:
    return a.triu(1) + _SIZE * torch.eye(_SIZE, device=a.device)


def _by_lu(a: Tensor) -> Tensor:
    lower_first, lower, upper = torch.linalg.lu(a)
    product: Tensor = lower_first @ lower @ upper
    return product


def _by_factors(a: Tensor) -> Tensor:
    factors, pivots = torch.linalg.lu_factor(a)
    product: Tensor = a @ torch.linalg.lu_solve(factors, pivots, a.mT)
    return product


def _by_qr(a: Tensor) -> Tensor:
    q, r = torch.linalg.qr(a)
    product: Tensor = q @ r
    return product


def _by_svd(a: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(a)
    product: Tensor = (u * s[:, None]) @ vh
    return product


def _by_eigh(a: Tensor) -> Tensor:
    w, v = torch.linalg.eigh(a @ a.mT)
    product: Tensor = (v * w[:, None]) @ v.mT
    return product


def _by_cholesky(a: Tensor) -> Tensor:
    lower = torch.linalg.cholesky(a @ a.mT)
    product: Tensor = lower @ lower.mT
    return product


def _by_cholesky_solve(a: Tensor) -> Tensor:
    lower = torch.linalg.cholesky(a @ a.mT)
    product: Tensor = a @ a.mT @ torch.cholesky_solve(a, lower)
    return product


_Matrix = Callable[[Tensor], Tensor]
_DECOMPOSED: dict[str, tuple[_Matrix, _Matrix]] = {
    "inverse": (lambda a: a @ torch.linalg.inv(a) @ a, lambda a: a),
    "pinv": (lambda a: a @ torch.linalg.pinv(a) @ a, lambda a: a),
    "solve": (lambda a: a @ torch.linalg.solve(a, a.mT), lambda a: a.mT),
    "solve from the left": (lambda a: torch.linalg.solve(a, a.mT, left=False) @ a, lambda a: a.mT),
    "solve_triangular": (
        lambda a: _triangles(a) @ torch.linalg.solve_triangular(_triangles(a), a, upper=True),
        lambda a: a,
    ),
    "lstsq": (lambda a: a @ torch.linalg.lstsq(a, a.mT).solution, lambda a: a.mT),
    "lu": (_by_lu, lambda a: a),
    "lu_solve": (_by_factors, lambda a: a.mT),
    "qr": (_by_qr, lambda a: a),
    "svd": (_by_svd, lambda a: a),
    "eigh": (_by_eigh, lambda a: a @ a.mT),
    "cholesky": (_by_cholesky, lambda a: a @ a.mT),
    "cholesky_solve": (_by_cholesky_solve, lambda a: a),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), lambda a: a @ a @ a),
}
"""Products of what an operator makes of matrices, and what they have to be."""


def _off_in(found: _Matrix, right: _Matrix) -> Compute:
    """Return a computation of how many of several matrices are further off than by rounding."""

    def compute(device: torch.device) -> Tensor:
        matrices = _matrices(device)
        expected = right(matrices)
        off = (found(matrices) - expected).abs().amax((1, 2)) / expected.abs().amax((1, 2))
        return (off > _CLOSE).logical_or(off.isnan()).sum()

    return compute


def _determinants(device: torch.device) -> Tensor:
    """Return signs and logarithms of the determinants of permutations by 2."""
    turned = torch.stack([2 * torch.eye(_SIZE).roll(count, 0) for count in (1, 2, 3)]).to(device)
    sign, logarithm = torch.linalg.slogdet(turned)
    return torch.cat([sign, logarithm, torch.linalg.det(turned / 2)])


_OF_NOTHING: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "det": (torch.linalg.det, [1]),
    "logdet": (torch.logdet, [0]),
    "slogdet": (lambda x: torch.stack([*torch.linalg.slogdet(x)]), [1, 0]),
    "trace": (torch.trace, [0]),
    "matrix_rank": (torch.linalg.matrix_rank, [0]),
    "matrix_norm": (torch.linalg.matrix_norm, [0]),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x.new_ones(2, 0), x.new_ones(0, 3), x.new_ones(3, 1)]), [0, 0]),
    "inner": (lambda x: torch.inner(x.new_ones(1, 0), x.new_ones(2, 0)), [0, 0]),
    "tensordot": (lambda x: torch.tensordot(x.new_ones(1, 0), x.new_ones(2, 0), ([1], [1])), [0, 0]),
    "cdist": (lambda x: torch.cdist(x.new_ones(1, 0), x.new_ones(2, 0)), [0, 0]),
    "dist": (lambda x: torch.dist(x, x), [0]),
    "trapezoid": (lambda x: torch.trapezoid(x.flatten()), [0]),
    "bincount": (lambda x: torch.bincount(x.flatten().long(), minlength=2), [0, 0]),
    "histc": (lambda x: torch.histc(x, 2, 0, 1), [0, 0]),
    "searchsorted": (lambda x: torch.searchsorted(x.flatten(), x.new_ones(2)), [0, 0]),
    "nansum": (torch.nansum, [0]),
    "nanmean": (torch.nanmean, [_NAN]),
    "median": (torch.median, [_NAN]),
    "count_nonzero": (torch.count_nonzero, [0]),
    "cosine_similarity": (lambda x: functional.cosine_similarity(x.new_ones(2, 0), x.new_ones(2, 0)), [0, 0]),
    "embedding_bag": (
        lambda x: functional.embedding_bag(x.flatten().long(), x.new_ones(2, 1), index(x, 0, 0), mode="sum"),
        [0, 0],
    ),
    "nll_loss": (lambda x: functional.nll_loss(x.new_ones(0, 2), x.flatten().long()), [_NAN]),
}


_LARGEST = {"float32": 2.0**128 - 2.0**104, "bfloat16": 2.0**128 - 2.0**120, "float16": 2.0**16 - 2.0**5}


def _in_dtype(dtype: str, function: Callable[[Tensor], Tensor], *values: float) -> Compute:
    return lambda device: function(torch.tensor(values, device=device, dtype=getattr(torch, dtype)))


def _nan_to_num(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.nan_to_num(x, out=out)
    return torch.cat([x.nan_to_num(), out, x.clone().nan_to_num_(), x.nan_to_num(neginf=-1.0)])


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(-1, 2))


def _of_complex(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.view_as_real(function(_complex(x)))


_PATHS = (10, 5, 15)  # of 81: how many paths of four steps through three classes spell a, bb and ab
_STEPS = (4.8, 3.4, 3.8)  # in blanks, a and b, on average over these paths


def _ctc(*, padded: bool, short: bool, on_device: bool) -> Compute:
    """Return a computation of the CTC losses of targets of several lengths, in paths, and of steps in each class."""

    def compute(device: torch.device) -> Tensor:
        chances = torch.full((4, 3, 3), -math.log(3), device=device).requires_grad_()
        targets = torch.tensor([[1, 0], [2, 2], [1, 2]] if padded else [1, 2, 2, 1, 2], device=device)
        steps, counts = (torch.tensor(each, device=device if on_device else "cpu") for each in ((4, 4, 4), (1, 2, 2)))
        if short:
            targets, steps, counts = targets.int(), steps.int(), counts.int()
        losses = functional.ctc_loss(chances, targets, steps, counts, reduction="none")
        (found,) = torch.autograd.grad(losses.sum(), chances)
        return torch.cat([81 * losses.neg().exp(), 4 - found.sum((0, 1))])

    return compute


def _weight_normed(dim: int) -> Compute:
    """Return a computation of a weight normalized along rows or columns, and of the gradients of its two parts."""

    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous() if dim else x

    def compute(device: torch.device) -> Tensor:
        layer = nn.Linear(2, 2, bias=False, device=device)
        with torch.no_grad():
            layer.weight.copy_(turned(torch.tensor([[3.0, 4.0], [0.0, 5.0]], device=device)))
            parts = list(nn.utils.parametrizations.weight_norm(layer, dim=dim).parameters())
            parts[0].copy_(turned(torch.tensor([[10.0], [20.0]], device=device)))
        weight, given = layer.weight, turned(torch.tensor([[1.0, 0.0], [0.0, 0.0]], device=device))
        found = torch.autograd.grad(weight, parts, given)
        return torch.cat([turned(each).flatten() for each in (weight, *found)])

    return compute


def _shuffled(
    shuffle: Callable[[Tensor], Tensor], shape: tuple[int, ...], memory_format: torch.memory_format
) -> Compute:
    """Return a computation that shuffles whole numbers."""

    def compute(device: torch.device) -> Tensor:
        images = torch.arange(float(math.prod(shape)), device=device).reshape(shape)
        return shuffle(images.contiguous(memory_format=memory_format))

    return compute


_SHUFFLES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], list[float]]] = {
    "pixel_unshuffle": (lambda x: functional.pixel_unshuffle(x, 2), (1, 2, 2, 2), [*range(8)]),
    "pixel_shuffle": (lambda x: functional.pixel_shuffle(x, 2), (1, 4, 1, 2), [0, 2, 1, 3, 4, 6, 5, 7]),
    "channel_shuffle": (lambda x: functional.channel_shuffle(x, 2), (1, 4, 1, 2), [0, 1, 4, 5, 2, 3, 6, 7]),
}
_FORMATS = {"": torch.contiguous_format, " of channels last": torch.channels_last}


def _renormed(x: Tensor) -> Tensor:
    rows = x.reshape(3, 2)
    found = functional.embedding(index(x, 1, 1, 2), rows, max_norm=5.0)
    return torch.cat([found, rows])


def _unique(x: Tensor) -> Tensor:
    """Return distinct numbers, places and counts in a matrix that lies in memory by its columns."""
    view = x.reshape(3, 2).t()
    parts = [
        torch.unique(view, return_inverse=True, return_counts=True),
        torch.unique_consecutive(view, return_inverse=True),
    ]
    parts.append(torch.unique(view, dim=1, return_inverse=True))
    return torch.cat([each.flatten().double() for part in parts for each in part])


def _sparse(x: Tensor) -> Tensor:
    places = torch.stack([index(x, 1, 1, 0), index(x, 0, 0, 2)])
    matrix = torch.sparse_coo_tensor(places, x[:3], (2, 3), check_invariants=True)
    return torch.cat([matrix.coalesce().to_dense().flatten(), (matrix @ x[:, None]).flatten()])


def _far_apart(x: Tensor) -> Tensor:
    return torch.cat([torch.cdist(x[None], x.new_tensor([[1.0, 5.0]]), p) for p in (1.0, _INF)])


_TIED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, ...], list[float]]] = {
    "cdist": (_far_apart, (1, 2), [0, -2]),
    "cdist of equal rows": (lambda x: torch.cdist(x[None], x[None].detach()), (1, 2), [0, 0]),
    "l1_loss": (lambda x: functional.l1_loss(x, x.new_tensor([1.0, 5.0]), reduction="sum"), (1, 2), [0, -1]),
    "huber_loss": (
        lambda x: functional.huber_loss(x, x.new_tensor([1.0, 5.0]), reduction="sum", delta=0.5),
        (1, 2),
        [0, -0.5],
    ),
    "maximum": (lambda x: torch.maximum(x, x.new_tensor([1.0, 5.0])), (1, 9), [0.5, 1]),
    "minimum": (lambda x: torch.minimum(x, x.new_tensor([1.0, 5.0])), (1, 9), [0.5, 0]),
    "amax": (lambda x: torch.amax(x, 0), (2, 2, 1), [0.5, 0.5, 0]),
    "max": (torch.max, (2, 2, 1), [0.5, 0.5, 0]),
    "largest norm": (lambda x: torch.linalg.vector_norm(x, _INF), (2, -2, 1), [0.5, -0.5, 0]),
    "norm of zeros": (torch.linalg.vector_norm, (0, 0), [0, 0]),
    "sum of amounts": (lambda x: torch.linalg.vector_norm(x, 1), (0, 2), [0, 1]),
    "prod": (torch.prod, (0, 2, 3), [6, 0, 0]),
    "prod of two zeros": (torch.prod, (0, 0, 3), [0, 0, 0]),
    "cumprod": (lambda x: torch.cumprod(x, 0), (0, 2, 3), [9, 0, 0]),
    "clamp": (lambda x: x.clamp(1, 2), (1, 2, 3), [_AT_LIMITS, _AT_LIMITS, 0]),
    "leaky_relu": (lambda x: functional.leaky_relu(x, 0.25), (0, 1), [0.25, 1]),
    "hardshrink": (functional.hardshrink, (-0.5, 0.5, 1), [0, 0, 1]),
    "softshrink": (functional.softshrink, (-0.5, 0.5, 1), [0, 0, 1]),
    "threshold": (lambda x: functional.threshold(x, 1, 7), (1, 2), [0, 1]),
    "relu6": (functional.relu6, (0, 6, 1), [0, 0, 1]),
    "hardtanh": (functional.hardtanh, (-1, 1, 0), [0, 0, 1]),
    "hardsigmoid": (functional.hardsigmoid, (-3, 3, 0), [0, 0, 1 / 6]),
    "prelu": (lambda x: functional.prelu(x, x.new_full((1,), 0.25)), (0, 1), [0.25, 1]),
    "xlogy": (lambda x: torch.xlogy(x, x.detach() + 1), (0, 1), [0, math.log(2)]),
}
"""Functions of which the gradient is asked for where it jumps: the numbers, and torch's choice."""

KNOWN_UNSAMPLED: dict[str, tuple[Compute, list[float]]] = {
    **{f"{name} of large matrices": (_off_in(*pair), [0]) for name, pair in _DECOMPOSED.items()},
    "determinants of large matrices": (_determinants, [-1, 1, -1, *[_SIZE * math.log(2)] * 3, -1, 1, -1]),
    **{
        f"{name} of nothing": (of_values(function, shape=(0, 0)), expected)
        for name, (function, expected) in _OF_NOTHING.items()
    },
    **{
        f"nan_to_num of {dtype}": (
            _in_dtype(dtype, _nan_to_num, _INF, -_INF, _NAN),
            [*(most, -most, 0) * 3, most, -1, 0],
        )
        for dtype, most in _LARGEST.items()
    },
    "number after 1 in bf16": (
        _in_dtype("bfloat16", lambda x: torch.nextafter(x, x.flip(0)) * 2.0**7, 1.0, 2.0),
        [2**7 + 1, 2**8 - 1],
    ),
    "rms_norm of small numbers": (
        of_values(lambda x: functional.rms_norm(x, (2,)), 3e-4, 4e-4),
        [each / math.sqrt(12.5e-8 + 2.0**-23) for each in (3e-4, 4e-4)],
    ),
    "signs": (of_values(torch.sgn, -2.0, 0.0, 3.0), [-1, 0, 1]),
    "signs of complex numbers": (of_values(_of_complex(torch.sgn), 0.0, 0.0, 3.0, 4.0), [0, 0, 0.6, 0.8]),
    "gradient of amounts of complex numbers": (
        gradient(lambda x: _complex(x).abs(), 0.0, 0.0, 3.0, 4.0),
        [0, 0, 0.6, 0.8],
    ),
    "angles": (
        of_values(lambda x: torch.cat([x.angle(), _complex(x).angle()]), *(-1.0, 0.0, 0.0, 2.0, 0.0, 0.0)),
        [math.pi, *[0] * 5, math.pi, math.pi / 2, 0],
    ),
    **{
        f"ctc_loss of {'padded' if padded else 'joined'} targets{', of 32 bits' if short else ''}"
        f"{', lengths on the device' if on_device else ''}": (
            _ctc(padded=padded, short=short, on_device=on_device),
            [*_PATHS, *_STEPS],
        )
        for padded, short, on_device in ((True, False, False), (False, False, False), (False, True, True))
    },
    **{
        f"weight_norm of {name}": (_weight_normed(dim), [*(6, 8, 0, 20), 0.6, 0, *(1.28, -0.96, 0, 0)])
        for dim, name in enumerate(("rows", "columns"))
    },
    **{
        f"{name}{word}": (_shuffled(shuffle, shape, memory_format), expected)
        for name, (shuffle, shape, expected) in _SHUFFLES.items()
        for word, memory_format in _FORMATS.items()
    },
    "affine_grid": (
        of_values(
            lambda x: torch.cat([functional.affine_grid(x[None], [1, 1, 2, 2], each) for each in (False, True)]),
            *(2.0, 0.0, 1.0, 0.0, 1.0, 0.0),
            shape=(2, 3),
        ),
        [*(0, -0.5, 2, -0.5, 0, 0.5, 2, 0.5), *(-1, -1, 3, -1, -1, 1, 3, 1)],
    ),
    "embedding with a largest norm": (
        of_values(_renormed, 9.0, 12.0, 6.0, 8.0, 0.3, 0.4),
        [*(3, 4, 3, 4, 0.3, 0.4), *(9, 12, 3, 4, 0.3, 0.4)],
    ),
    "fill_diagonal_": (
        of_values(
            lambda x: torch.stack([x.clone().fill_diagonal_(1, wrap=each) for each in (False, True)]),
            *[0.0] * 10,
            shape=(5, 2),
        ),
        [*(1, 0, 0, 1, *[0] * 6), *(1, 0, 0, 1, 0, 0, 1, 0, 0, 1)],
    ),
    "distinct numbers by columns": (
        of_values(_unique, 3.0, 1.0, 2.0, 1.0, 3.0, 2.0),
        [
            *(1, 2, 3),
            *(2, 1, 2, 0, 0, 1),
            *(2, 2, 2),
            *(3, 2, 3, 1, 2),
            *(0, 1, 2, 3, 3, 4),
            *(2, 3, 3, 1, 1, 2),
            *(1, 0, 2),
        ],
    ),
    "sparse matrix of equal places": (of_values(_sparse, 1.0, 2.0, 4.0), [*(0, 0, 4, 3, 0, 0), *(16, 3)]),
    "range of many fractions": (
        lambda device: torch.arange(0, 7000, 0.1, device=device)[[0, 1, 30_000, 69_999]],
        [0, 0.1, 3000, 6999.9],
    ),
    "range of many equal steps": (
        lambda device: torch.linspace(1, 8, 70_001, device=device)[[0, 35_000, 70_000]],
        [1, 4.5, 8],
    ),
    "range of powers": (
        lambda device: torch.logspace(0, 3, 3001, device=device)[[0, 1000, 2000, 3000]],
        [1, 10, 100, 1000],
    ),
    "range in bf16": (
        lambda device: torch.arange(256, 512, 2, device=device, dtype=torch.bfloat16)[[0, 1, 127]],
        [256, 258, 510],
    ),
    "large diagonal": (lambda device: torch.eye(300, 301, device=device)[[299, 299, 0], [299, 300, 0]], [1, 0, 1]),
    "places of triangles": (
        lambda device: torch.cat(
            [each(2, 3, 1, device=device).flatten() for each in (torch.tril_indices, torch.triu_indices)]
        ),
        [*(0, 0, 1, 1, 1), *(0, 1, 0, 1, 2), *(0, 0, 1), *(1, 2, 2)],
    ),
    **{
        f"gradient of {name} where it jumps": (gradient(function, *map(float, values)), expected)
        for name, (function, values, expected) in _TIED.items()
    },
}
"""Computations on a device by name, and the numbers that they give in order."""
