"""Known results in which much depends on where numbers lie: in views, many dimensions, long rows, or far behind."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 70_000  # more than 16 bits count
_FAR = (2**16, _ROWS - 1)  # of which 16 bits would be 0 and 4,463
_CHANCE = 2**16 / (2**16 + _ROWS - 1)  # of a class that is 2**16 times as likely as each other one

Compute = Callable[[torch.device], Tensor]
Write = Callable[[Tensor], object]
Reduce = Callable[[Tensor, int], Tensor]


def _range(device: torch.device) -> Tensor:
    return torch.arange(_ROWS, device=device)


def _turned(*counts: int) -> Compute:
    """Return a computation that copies tensors of many dimensions in reversed order, in every way, and reads places."""

    def compute(device: torch.device) -> Tensor:
        places = []
        for count in counts:
            order = range(count - 1, -1, -1)
            view = torch.arange(2**count, device=device).float().view([2] * count).permute(*order)
            copies = [view.contiguous(), view.reshape(-1), view.int(), torch.cat([view, view])]
            copies += [torch.empty_like(copies[0]).copy_(view), view + torch.zeros_like(copies[0])]
            places += [copy.flatten()[2 ** torch.arange(count, device=device)] for copy in copies]
        return torch.cat([each.float() for each in places])

    return compute


def _places(*counts: int) -> list[float]:
    return [2.0**place for count in counts for _ in range(6) for place in range(count - 1, -1, -1)]


def _over_dimensions(device: torch.device) -> Tensor:
    """Reduce and broadcast over every other one of six dimensions."""
    view, eight = torch.arange(64.0, device=device).view([2] * 6), torch.arange(8.0, device=device)
    both = eight.view(2, 1, 2, 1, 2, 1) * 8 + eight.view(1, 2, 1, 2, 1, 2)
    reduced = [view.sum((0, 2, 4)), view.amax((0, 2, 4)), view.mean((0, 2, 4))]
    return torch.cat([*(each.flatten() for each in reduced), both.flatten()[2 ** torch.arange(6, device=device)]])


def _reduced_with(value: float, reduce: Reduce) -> Compute:
    """Return a computation that reduces rows and columns of zeros with one other number, at the ends or inside."""

    def compute(device: torch.device) -> Tensor:
        rows = torch.zeros(4, _ROWS, device=device)
        for row, place in enumerate((0, 1500, _ROWS // 2, _ROWS - 1)):
            rows[row, place] = value
        return torch.cat([reduce(rows, 1), reduce(rows.t().contiguous(), 0), reduce(rows[:2, :4000].contiguous(), 1)])

    return compute


def _loss_of_many_classes(device: torch.device) -> Tensor:
    """Return the loss of two rows whose target is 2**16 times as likely as each other class, and its gradients.

    In any order, sums of the exponentials are exact in fp32: each class adds 2**-16.
    """
    targets = torch.tensor(_FAR, device=device)
    rows = torch.zeros(2, _ROWS, device=device).scatter(1, targets[:, None], 16 * math.log(2)).requires_grad_()
    loss = functional.cross_entropy(rows, targets)
    (found,) = torch.autograd.grad(loss, rows)
    right, wrong = (found.gather(1, each[:, None]).flatten() for each in (targets, targets - 2**16))
    return torch.cat([loss.exp()[None], right, wrong * 2**16])


def _read_far(read: Callable[[Tensor, Tensor], Tensor]) -> Compute:
    return lambda device: read(_range(device), torch.tensor(_FAR, device=device))


def _written_far(write: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Compute:
    """Return a computation that writes ones at far places, and reads there and where 16 bits would write."""

    def compute(device: torch.device) -> Tensor:
        places = torch.tensor(_FAR, device=device)
        found = write(torch.zeros(_ROWS, device=device), places, torch.ones(2, device=device))
        return found[torch.cat([places, places - 2**16])]

    return compute


def _zeroed(view: Tensor) -> None:
    torch._foreach_zero_([view, view])
    view.add_(3)


def _written(write: Write) -> Compute:
    """Return a computation that makes 3 of views of ones in place: how far they are from it, and their neighbours."""

    def compute(device: torch.device) -> Tensor:
        found = []
        for view in _VIEWS:
            base = torch.ones(3, 2 * _ROWS, device=device)
            write(part := view(base))
            found += [part.sub(3).abs().sum(), base.sum() - base.numel() - 2 * part.numel()]
        return torch.stack(found)

    return compute


def _in_order(source: torch.dtype, target: torch.dtype) -> Compute:
    """Return a computation that copies and converts numbers from and to views, and counts those that are elsewhere."""

    def compute(device: torch.device) -> Tensor:
        found = []
        numbers = torch.arange(6 * _ROWS, device=device).remainder(251).view(3, -1)
        for view in _VIEWS:
            dense, right = view(numbers).to(source).contiguous(), view(numbers)
            part = view(torch.zeros(3, 2 * _ROWS, device=device, dtype=target)).copy_(dense)
            found += [part.ne(right).sum(), torch.zeros_like(dense).copy_(part).ne(right).sum()]
        return torch.stack(found)

    return compute


_VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda base: base[:, ::2],
    lambda base: base[:, 1::2].t(),
    lambda base: base[::2, 5:-3],
    lambda base: base.view(3, -1, 2)[..., 1],
    lambda base: base.t(),
)
_WRITES: dict[str, Write] = {
    "zero_": lambda view: view.zero_().add_(3),
    "fill_": lambda view: view.fill_(3),
    "copy_ of one number": lambda view: view.copy_(torch.full((), 3.0, device=view.device)),
    "copy_": lambda view: view.copy_(torch.full(view.shape, 3.0, device=view.device)),
    "copy_ of another dtype": lambda view: view.copy_(torch.full(view.shape, 3, device=view.device)),
    "add_": lambda view: view.add_(torch.ones_like(view), alpha=2),
    "mul_": lambda view: view.mul_(3),
    "clamp_": lambda view: view.clamp_(min=3),
    "masked_fill_": lambda view: view.masked_fill_(view > 0, 3),
    "sub with out=": lambda view: torch.sub(torch.full(view.shape, 4.0, device=view.device), 1, out=view),
    "zero_ of lists": _zeroed,
}
_REDUCTIONS: dict[str, Reduce] = {
    "amax": torch.amax,
    "max": lambda x, dim: x.max(dim)[0],
    "aminmax": lambda x, dim: torch.aminmax(x, dim=dim)[1],
    "amin": torch.amin,
    "sum": torch.sum,
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "largest norm": lambda x, dim: torch.linalg.vector_norm(x, math.inf, dim=dim),
    "logsumexp": torch.logsumexp,
    "cummax": lambda x, dim: x.cummax(dim)[0].select(dim, -1),
    "sort": lambda x, dim: x.sort(dim, descending=True)[0].select(dim, 0),
    "max of all": lambda x, dim: torch.stack([each.max() for each in x.unbind(1 - dim)]),
    "norm in lists": lambda x, dim: torch.stack(torch._foreach_norm([*x.unbind(1 - dim)])),
    "dot": lambda x, dim: torch.stack([each.dot(torch.ones_like(each)) for each in x.unbind(1 - dim)]),
}
_READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, places: x.gather(0, places),
    "take": torch.take,
    "index": lambda x, places: x[places],
    "index_select": lambda x, places: x.index_select(0, places),
    "searchsorted": torch.searchsorted,
}
_WRITES_FAR: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scatter": lambda x, places, ones: x.scatter(0, places, ones),
    "scatter_add": lambda x, places, ones: x.scatter_add(0, places, ones),
    "scatter_reduce": lambda x, places, ones: x.scatter_reduce(0, places, ones, "amax"),
    "index_add": lambda x, places, ones: x.index_add(0, places, ones),
    "index_copy": lambda x, places, ones: x.index_copy(0, places, ones),
    "index_put": lambda x, places, ones: x.index_put((places,), ones),
    "index_fill": lambda x, places, ones: x.index_fill(0, places, 1.0),
    "bincount": lambda x, places, ones: torch.bincount(places),
    "one_hot": lambda x, places, ones: functional.one_hot(places).sum(0),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int64": torch.int64}
_OTHERS = [0, 1, 4, 5, 16, 17, 20, 21]  # what three of six dimensions with two places make, the others at 0

KNOWN_PLACES: dict[str, tuple[Compute, list[float]]] = {
    "copies of five to eight dimensions": (_turned(5, 6, 7, 8), _places(5, 6, 7, 8)),
    "copies of ten dimensions": (_turned(10), _places(10)),
    "reductions of six dimensions": (
        _over_dimensions,
        [
            *(168 + 8 * each for each in _OTHERS),
            *(42 + each for each in _OTHERS),
            *(21 + each for each in _OTHERS),
            *(1, 8, 2, 16, 4, 32),
        ],
    ),
    "loss of many classes": (
        _loss_of_many_classes,
        [1 / _CHANCE, *[(_CHANCE - 1) / 2] * 2, *[_CHANCE / 2] * 2],
    ),
    **{
        f"{name} of {word} in long rows": (_reduced_with(value, reduce), [value] * 10)
        for name, reduce in _REDUCTIONS.items()
        for word, value in (("NaN", math.nan), ("inf", -math.inf if name == "amin" else math.inf))
    },
    **{
        f"{one} as {other} in views of many": (_in_order(_DTYPES[one], _DTYPES[other]), [0.0] * 2 * len(_VIEWS))
        for one in _DTYPES
        for other in _DTYPES
    },
    **{f"{name} at far places": (_read_far(read), [*map(float, _FAR)]) for name, read in _READS.items()},
    **{f"{name} at far places": (_written_far(write), [1.0, 1.0, 0.0, 0.0]) for name, write in _WRITES_FAR.items()},
    **{f"{name} of views of many": (_written(write), [0.0] * 2 * len(_VIEWS)) for name, write in _WRITES.items()},
}
"""Computations on a device by name, and the numbers that they give in order."""
