"""Collectives of a job of two ranks on large tensors of each dtype and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import accelcore

OF_LARGE = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool")
_OF_EXCHANGES = ("float32", "bfloat16", "int64", "bool")  # one of each size
LARGE = (65_537, 300_001)  # elements: more than a bucket, and no multiple of what ranks or vectors take
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before 2.13
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda base: base,
    "every other": lambda base: base[1::2],
    "transposed": lambda base: base[: base.numel() // 3 * 3].view(-1, 3).t(),
}
"""A view of each kind of a large vector."""
COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda one, other: one + other,
    "avg": lambda one, other: (one + other) / 2,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": lambda one, other: one.mul(other),
    "broadcast": lambda one, other: other,
}


def of_large(job: Any, device: torch.device) -> dict[str, dict[str, str]]:
    """Return what is wrong with large tensors after each collective of two ranks, by operation and dtype, or "".

    A refusal begins with "refused: ".
    """
    found: dict[str, dict[str, str]] = {operation: {} for operation in (*COMBINED, *EXCHANGES)}
    for name, operation in product(OF_LARGE, COMBINED):
        dtype = getattr(torch, name)
        undefined = "avg" if not dtype.is_floating_point else ""
        if operation != undefined and (operation, name) != ("sum", "bool"):
            found[operation][name] = _combined(job, device, operation, dtype)
    for name, (operation, exchange) in product(_OF_EXCHANGES, EXCHANGES.items()):
        found[operation][name] = _tried(exchange, device, getattr(torch, name))
    return found


@lru_cache(maxsize=4)
def _numbers(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return whole numbers whose sums and products are exact in each dtype, and whose period divides no bucket."""
    period = torch.arange(13).mul_(7 + 4 * rank).add_(5 * rank).remainder_(13)
    values = period < 5 if dtype == torch.bool else period - 6 * (dtype != torch.uint8)
    return values.to(dtype).repeat(size // 13 + 1)[:size]


def _combined(job: Any, device: torch.device, operation: str, dtype: torch.dtype) -> str:
    """Return what is wrong with an operation in place on large tensors and on views of them."""
    wrong: list[str] = []  # after which a rank goes on, because the other may find nothing
    for layout, size in product(_LAYOUTS, LARGE):
        if size == LARGE[1] and (layout, str(dtype).split(".")[1] in _OF_EXCHANGES) != ("whole", True):
            continue
        view, pair = _LAYOUTS[layout], [_numbers(rank, size, dtype) for rank in range(2)]
        base, expected = pair[job.rank].clone().to(device), pair[job.rank].clone()
        view(expected).copy_(COMBINED[operation](*map(view, pair)))
        try:
            if operation == "broadcast":
                job.broadcast(view(base), 1)
            elif operation != "product":
                job.all_reduce(view(base), operation)
            elif layout == "whole":  # torch's own may refuse views
                dist.all_reduce(base, dist.ReduceOp.PRODUCT)
            else:
                continue
        except (RuntimeError, ValueError, accelcore.AccelError) as error:
            return f"refused: {error}"
        why = _difference(base, expected)
        wrong += [f"{why}, {layout}"] if why else []
    return "; ".join(wrong)


def _tried(exchange: Callable[..., Iterator[tuple[Tensor, Tensor]]], device: torch.device, dtype: torch.dtype) -> str:
    """Return what is wrong with the pairs of tensors, found and expected, of one of torch's collectives."""
    pair = [_numbers(rank, LARGE[0], dtype) for rank in range(2)]
    try:
        return "; ".join(filter(None, [_difference(*each) for each in exchange(dist.get_rank(), pair, device)]))
    except (RuntimeError, ValueError) as error:
        return f"refused: {error}"


def _difference(found: Tensor, expected: Tensor) -> str:
    found = found.cpu()
    if torch.equal(found, expected):
        return ""
    wrong = (found != expected).flatten()
    first = int(wrong.int().argmax())
    values = found.flatten()[first].item(), expected.flatten()[first].item()
    return f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {first}: {values[0]}, not {values[1]}"


def _all_to_all(
    rank: int, pair: list[Tensor], device: torch.device, *, sent: tuple[tuple[int, int], ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Exchange rows of two columns; `sent` has the number of them from each rank to each rank."""
    rows = [numbers[: 2 * sum(each)].view(-1, 2) for numbers, each in zip(pair, sent, strict=True)]
    parts = [mine.split(list(each))[rank] for mine, each in zip(rows, sent, strict=True)]
    expected = torch.cat(parts)
    received = torch.empty_like(expected, device=device)
    dist.all_to_all_single(received, rows[rank].to(device), [len(part) for part in parts], list(sent[rank]))
    yield received, expected


def _all_gather(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Gather large tensors in a list, and then in one tensor."""
    parts = [torch.empty_like(each, device=device) for each in pair]
    dist.all_gather(parts, pair[rank].to(device))
    yield from zip(parts, pair, strict=True)
    whole = torch.empty(2 * LARGE[0], dtype=pair[0].dtype, device=device)
    _all_gather_single(whole, pair[rank].to(device))
    yield whole, torch.cat(pair)


def _all_gather_uneven(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Gather tensors of another size on each rank."""
    uneven = [pair[0], pair[1][:30_001]]
    parts = [torch.empty_like(each, device=device) for each in uneven]
    dist.all_gather(parts, uneven[rank].to(device))
    yield from zip(parts, uneven, strict=True)


def _all_gather_strided(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Gather every other element into every other element."""
    parts = [torch.zeros_like(each, device=device) for each in pair]
    dist.all_gather([part[::2] for part in parts], pair[rank].to(device)[::2])
    for part, each in zip(parts, pair, strict=True):
        expected = torch.zeros_like(each)
        expected[::2] = each[::2]
        yield part, expected


def _reduce_scatter(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Scatter the larger numbers of both ranks in halves."""
    halves = [each[:-1] for each in pair]
    expected = torch.maximum(*halves).chunk(2)[rank]
    received = torch.empty_like(expected, device=device)
    _reduce_scatter_single(received, halves[rank].to(device), dist.ReduceOp.MAX)
    yield received, expected


def _reduce_scatter_uneven(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Scatter the larger numbers of both ranks in parts of 2 and 1 thirds."""
    expected = torch.maximum(*pair).split([40_000, 25_537])[rank]
    received = torch.empty_like(expected, device=device)
    dist.reduce_scatter(received, list(pair[rank].to(device).split([40_000, 25_537])), dist.ReduceOp.MAX)
    yield received, expected


def _reduce_scatter_strided(rank: int, pair: list[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Scatter the larger numbers of both ranks, of even and of odd elements."""
    expected = torch.maximum(*pair)[:-1].view(-1, 2).t()[rank]
    received = torch.empty_like(expected, device=device)
    parts = list(pair[rank].to(device)[:-1].view(-1, 2).t())
    dist.reduce_scatter(received, parts, dist.ReduceOp.MAX)
    yield received, expected


EXCHANGES: dict[str, Callable[..., Iterator[tuple[Tensor, Tensor]]]] = {
    "all_to_all in unequal splits": partial(_all_to_all, sent=((1, 30_001), (20_001, 2))),
    "all_to_all one way": partial(_all_to_all, sent=((0, 30_001), (0, 3))),
    "all_gather": _all_gather,
    "all_gather of uneven tensors": _all_gather_uneven,
    "all_gather of strided tensors": _all_gather_strided,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter in uneven parts": _reduce_scatter_uneven,
    "reduce_scatter of strided tensors": _reduce_scatter_strided,
}
"""torch's collectives that backends may refuse, each a generator of pairs of tensors, found and expected."""
