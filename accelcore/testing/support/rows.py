"""Operators that reduce, normalize or order rows, on lengths around the widths of vectors and beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore.known_faults import KnownFault
from accelcore.testing.support.case import Case
from accelcore.testing.support.found import EQUAL, LARGE, Found, Variant

_LENGTHS = (9, 17, 33, 129, 768, 1025, 4099)
_OF_LOW = 33, 4099  # lengths that are tried in every dtype: of the longer rows a sum in low precision stands still
_DIMENSIONS = {"rows": -1, "columns": 0, "planes": 1}  # where the elements of a row are neighbours, or not

_EXPONENT_OVERFLOWS = 64.0  # times numbers around 1: a kernel that does not subtract the largest first has no result

_MOST_ATTENDED = 257  # keys of as many queries
_MOST_SQUARE = 129  # rows of a matrix that is decomposed


def _definite(x: Tensor) -> Tensor:
    part = x[:, :_MOST_SQUARE]
    return part.t() @ part + 4 * torch.eye(part.shape[1]).to(x)


def _spectrum(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.complex(wide, wide.detach().flip(1))


def _attention(x: Tensor, **options: Any) -> Tensor:
    """Attend to as many keys as there are columns: the largest scores are those of the first keys and of the last."""
    keys = torch.cat([x, x.detach().flip(1), x[:2]]).t().contiguous()[None, None]
    queries = keys if options else 3 * keys.detach().roll(2, 2)[:, :, :5]
    return functional.scaled_dot_product_attention(queries, keys, keys.detach().flip(-1), **options)


_OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: functional.group_norm(x[None], 3),
    "instance_norm": lambda x: functional.instance_norm(x[None]),
    "batch_norm": lambda x: functional.batch_norm(x.t(), None, None, training=True),
    "batch_norm of images": lambda x: functional.batch_norm(x[None], None, None, training=True),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(3, device=x.device)),
    "sum of all": torch.sum,
    "mean of all": torch.mean,
    "mse_loss": lambda x: functional.mse_loss(x, x.detach().flip(0)),
    "adaptive_avg_pool1d": lambda x: functional.adaptive_avg_pool1d(x, 1),
    "mm": lambda x: x @ x.detach().t(),
    "mv": lambda x: x @ x.detach()[0],
    "products that are added": lambda x: (
        torch.addmm(x[:, :3], x, x.detach().t()),
        torch.baddbmm(x[None, :, :3], x[None], x.detach().t()[None]),
        functional.linear(x, x.detach(), x[0, :3]),
    ),
    "products of batches": lambda x: (torch.bmm(x[None], x.detach().t()[None]), torch.dot(x[0], x.detach()[1])),
    "mm of many columns": lambda x: x.repeat(23, 1).t() @ x.detach().flip(1)[:, :130].repeat(23, 1),
    "bmm of many columns": lambda x: torch.bmm(x.expand(2, 3, -1).mT, x.detach().flip(1)[:, :130].expand(2, 3, -1)),
    "fft": lambda x: torch.view_as_real(torch.fft.fft(_spectrum(x))),
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(_spectrum(x).real)),
    "irfft": lambda x: torch.fft.irfft(_spectrum(x)),
    "irfft to odd lengths": lambda x: torch.fft.irfft(_spectrum(x), 2 * x.shape[1] - 1),
    "attention": _attention,
    "causal attention": lambda x: _attention(x[:, :_MOST_ATTENDED], is_causal=True),
    "cholesky": lambda x: torch.linalg.cholesky(_definite(x)),
    "inverse": lambda x: torch.linalg.inv(_definite(x)),
    "solution": lambda x: torch.linalg.solve(_definite(x), x.detach()[:, :_MOST_SQUARE].t()),
    "determinant": lambda x: torch.linalg.slogdet(_definite(x)),
}
_ALONG: dict[str, Callable[[Tensor, int], Any]] = {
    "normalize": lambda x, along: functional.normalize(x, dim=along),
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "logsumexp": torch.logsumexp,
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "prod": lambda x, along: (1 + x / x.shape[along]).prod(along),
    "var": torch.var,
    "std": torch.std,
    "vector_norm": lambda x, along: torch.linalg.vector_norm(x, dim=along),
    "norm of order 1": lambda x, along: torch.linalg.vector_norm(x, 1, along),
    "cosine_similarity": lambda x, along: functional.cosine_similarity(x, x.detach().flip(0), along),
    "amax": torch.amax,
    "argmax": torch.argmax,
    "glu": lambda x, along: functional.glu(torch.cat([x, x.detach().flip(0)], along), along),
    "cumsum": torch.cumsum,
    "logcumsumexp": torch.logcumsumexp,
}
_ORDERED: dict[str, Callable[[Tensor, int], Any]] = {  # among equal numbers
    "order, stable": lambda x, along: x.sort(dim=along, stable=True),
    "order, stable, descending": lambda x, along: x.sort(dim=along, stable=True, descending=True),
    "places of a stable order": lambda x, along: x.argsort(dim=along, stable=True),
    "the first of the largest": lambda x, along: (x.argmax(along), *x.max(along)),
    "the first of the least": lambda x, along: (x.argmin(along), *x.min(along)),
    "the last of the largest": torch.cummax,
}
_OF_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # whose gradient is a sum over rows
    "addition": torch.add,
    "multiplication": torch.mul,
    "linear": lambda x, weight: functional.linear(x, torch.eye(3).to(x), weight),
    "weight of linear": lambda x, weight: functional.linear(x, weight[None]),
    "addmm": lambda x, weight: torch.addmm(weight, x, torch.eye(3).to(x)),
    "conv1d": lambda x, weight: functional.conv1d(x.t()[None], torch.eye(3).to(x)[..., None], weight)[0].t(),
    "conv2d": lambda x, weight: functional.conv2d(
        x.reshape(-1, 3, 1, 1), torch.eye(3).to(x)[..., None, None], weight
    ).flatten(1),
    "prelu": lambda x, weight: functional.prelu(-x, weight),
    "layer_norm": lambda x, weight: functional.layer_norm(x, (3,), weight, weight),
    "group_norm": lambda x, weight: functional.group_norm(x, 1, weight, weight),
    "batch_norm": lambda x, weight: functional.batch_norm(x, None, None, weight, weight, training=True),
    "expand": lambda x, weight: weight.expand_as(x),
}
_ADDED = (  # of which the last elements count as much as thousands before them
    *("sum of all", "mean of all", "mse_loss", "adaptive_avg_pool1d", "mm", "mv", "products that are added"),
    *("products of batches", "sum", "nansum", "mean", "var", "std", "vector_norm", "norm of order 1", "cumsum"),
    *("cosine_similarity", *(f"gradient of {name} over rows" for name in ("addition", "multiplication", "linear"))),
    *(f"gradient of {name} over rows" for name in ("weight of linear", "addmm", "conv1d", "conv2d", "prelu", "expand")),
)
_OF_LARGE = (*_OF_ROWS.keys() - {"cholesky", "inverse", "solution", "determinant"}, *_ALONG.keys() - {"prod"})

ROWS = (*_OF_ROWS, *_ALONG, *_ORDERED, *(f"gradient of {name} over rows" for name in _OF_WEIGHTS))
"""Names of operators, of three rows."""


class _OfRows:
    inplace_variant, supports_out, supports_autograd = None, False, True

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op


def _weighted(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the weighted sum of a function's results: weights are positive, as a sum of both signs stays small."""

    def total(x: Tensor, weight: Tensor) -> Tensor:
        found = function(x, weight)
        return (found * (1 + torch.arange(len(found)) % 4 / 4).to(found)[:, None]).sum()

    return total


def _forms(name: str, rows: Tensor) -> Iterator[tuple[str, Callable[..., Any], tuple[Tensor, ...]]]:
    """Yield in words how rows lie in memory, an operator of them, and its arguments."""
    if name in _OF_ROWS:
        yield "rows", _OF_ROWS[name], (rows,)
    elif name in _ALONG or name in _ORDERED:
        columns = rows.t().contiguous()
        laid_out = {"rows": rows, "columns": columns, "planes": torch.stack([columns, columns.flip(0)])}
        function = {**_ALONG, **_ORDERED}[name]
        for form, each in laid_out.items():
            yield form, lambda x, along=_DIMENSIONS[form]: function(x, along), (each,)
    else:
        of_weights = _OF_WEIGHTS[name.removeprefix("gradient of ").removesuffix(" over rows")]
        yield "columns", _weighted(of_weights), (rows.t().contiguous(), torch.linspace(0.5, 1, 3).to(rows))


def compare_rows(
    device: torch.device, name: str, dtypes: Sequence[torch.dtype], faults: Sequence[KnownFault] = ()
) -> Found:
    """Compare an operator of `ROWS` with float64 on the CPU."""
    found = Found(faults)
    generator = torch.Generator().manual_seed(5)
    for length in _LENGTHS:
        numbers = torch.randn(3, length, generator=generator)
        for dtype in dtypes if length in _OF_LOW else (torch.float32,):
            rows = numbers.abs() if length == _OF_LOW[-1] and dtype != torch.float32 else numbers
            rows = ((2 * rows).round() if name in _ORDERED else rows).to(dtype)
            large = length == _OF_LOW[-1] and name in _OF_LARGE
            for factor in (1.0, *[_EXPONENT_OVERFLOWS] * large):
                scaled = factor * rows
                if name in _ADDED and factor == 1 and length == _OF_LOW[-1] and dtype != torch.float32:
                    scaled[:, -3:] *= 64
                for form, op, given in _forms(name, scaled):
                    # Of equal numbers a gradient is a sum, which a device may add up in the low precision.
                    differentiable = name not in _ORDERED or dtype == torch.float32
                    leaves = tuple(each.clone().requires_grad_(differentiable) for each in given)
                    where = f"of {form} of {length}"
                    what = LARGE if factor > 1 else EQUAL if name in _ORDERED else where
                    called = name if what == where else f"{name} {where}"
                    Case(found, device, called, Variant(_OfRows(op), dtype, (leaves, {}), what)).run()
    return found
