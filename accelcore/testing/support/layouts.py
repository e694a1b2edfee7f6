"""Arguments of an operator in other layouts, sizes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import chain, product, repeat
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("", "strided", "transposed", "channels last")
"""Layouts of arguments: as the sample has them, with gaps between the elements, with dimensions in reverse order, with
channels last."""

MIXED = "the first in another order"
"""Layout of the sample, but for the first tensor: its channels come last, or its dimensions lie in reverse order."""

BEHIND = "behind other elements"
"""Layout of the sample, in memory that begins and ends with an element of another tensor."""

MARKED = "negative or conjugate by a mark"
"""Layout of numbers of which the memory holds the negative, or the conjugate, and torch knows it."""

EMPTY = "of no elements"
TO_RESIZE = (EMPTY, "of another shape")
"""Shapes of memory that an operator resizes if it is given as `out=`."""

_UNITS = 8  # in which an argument may differ that is written to as it was

WHOLE = (torch.int64, torch.int32)
_COMPLEX = (torch.complex32, torch.complex64)
_NO_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype})


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested tuples, lists and dicts with each leaf changed, several times as fast as pytree."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, each) for each in value])
    if kind is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    return change(value)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    found: list[Tensor] = []
    _add_tensors(value, found)
    return found


def _add_tensors(value: Any, found: list[Tensor]) -> None:
    """Add the tensors in nested containers; the usual classes first, because this runs millions of times."""
    kind = type(value)
    if kind in _NO_TENSORS:
        return
    if kind is tuple or kind is list:
        for each in value:
            _add_tensors(each, found)
    elif isinstance(value, Tensor):  # which takes longer to ask of other classes
        found.append(value)
    elif isinstance(value, tuple):  # torch's named results
        for each in value:
            _add_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _add_tensors(each, found)


def placed(arguments: Any, device: torch.device, layout: str, *, graph: bool = False) -> Any:
    """Return copies of arguments on a device, in a layout; with `graph`, leaves that require gradients."""
    images = layout == MIXED and tensors(arguments)[0].dim() in (4, 5)
    first = "channels last" if images else "transposed"
    layouts = chain([first] if layout == MIXED else [], repeat("" if layout == MIXED else layout))

    def move(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu"):
            return device
        if not isinstance(value, Tensor):
            return value
        moved = laid_out(value.detach(), device, next(layouts))
        return moved.requires_grad_(value.requires_grad and graph)

    return mapped(move, arguments)


def beside(tensor: Tensor) -> Tensor:
    """Return a copy of the elements around a tensor's own in the memory of which it is a view, on the host."""
    if tensor._base is None:
        return tensor.new_empty(0).cpu()
    others = torch.ones(tensor._base.shape, dtype=torch.bool)
    others.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return tensor._base.detach().cpu()[others]


def laid_out(value: Tensor, device: torch.device, layout: str) -> Tensor:
    """Return a copy of a tensor on a device, in one of `LAYOUTS` or `BEHIND`, or in channels last and `BEHIND`."""
    if value.layout != torch.strided or value.is_conj() or value.is_neg():
        return value.to(device, copy=True)
    other = 3.5 if value.dtype.is_floating_point else 1
    if layout == MARKED and value.is_complex():
        return value.conj().resolve_conj().to(device).conj()
    if layout == MARKED and value.dtype == torch.float32:
        return torch.complex(torch.zeros_like(value), -value).to(device).conj().imag
    if layout == "strided" and value.dim():
        return torch.stack([torch.full_like(value, other), value], -1).to(device)[..., 1]
    if layout:
        order = list(range(value.dim()))
        behind = BEHIND in layout
        if layout == "transposed":
            order.reverse()
        elif layout.startswith("channels last") and value.dim() in (4, 5):
            order.append(order.pop(1))
        dense = value.permute(order)
        begin = 0 if value.dim() > 1 and not behind else 1
        margins = (value.new_full((count,), other) for count in (begin, 1))
        memory = torch.cat([next(margins), dense.reshape(-1), next(margins)]).to(device)
        return memory[begin:-1].view(dense.shape).permute(sorted(range(value.dim()), key=order.__getitem__))
    count = value.untyped_storage().nbytes() // value.element_size()
    if count == value.numel() and value.is_contiguous():  # all of its memory
        return value.to(device, copy=True)
    memory = value.as_strided((count,), (1,), 0).to(device, copy=True)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def given_as_out(value: Any, *, layout: str, dtype: torch.dtype | None) -> Any:
    """Return a tensor like a result, in a layout and dtype, for the operator to write to; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    if layout in TO_RESIZE:
        return value.new_ones(0 if layout == EMPTY else (2, value.numel(), 3))
    value = value.to(dtype) if dtype and (value.is_floating_point() or value.dtype == torch.bool) else value
    return laid_out(torch.full_like(value, 1 if value.dtype == torch.bool else 77), value.device, layout)


def wide(arguments: Any, dtype: torch.dtype) -> Any:
    """Return the arguments with tensors of `dtype` in float64, complex ones in complex128."""

    def widen(value: Any) -> Any:
        if value is dtype and dtype.is_floating_point:
            return torch.float64
        if not isinstance(value, Tensor):
            return value
        if value.dtype.is_floating_point and value.dtype != torch.float64 and dtype.is_floating_point:
            return value.detach().double().requires_grad_(value.requires_grad)
        if value.dtype in _COMPLEX:
            return value.detach().to(torch.complex128).requires_grad_(value.requires_grad)
        return value

    return mapped(widen, arguments)


def emptied(arguments: Any) -> Any:
    """Return the arguments without rows; None if there is no tensor with rows."""
    return changed_tensors(
        arguments, lambda value, rows: value[:0] if value.dim() and value.shape[0] == rows else value
    )


def without_size(arguments: Any) -> Iterator[Any]:
    """Yield the arguments with each dimension of the first tensor empty; see `resized`."""
    for dimension in range(tensors(arguments)[0].dim()):
        yield from resized(arguments, dimension, 0)


def resized(arguments: Any, dimension: int, length: int) -> Iterator[Any]:
    """Yield the arguments with another length of a dimension of the first tensor, and of one, or none, of each other.

    Only dimensions of the same size are changed. Not all of the arguments fit together.
    """
    first, *others = tensors(arguments)
    size = first.shape[dimension]
    ways = [[None, *(n for n, count in enumerate(each.shape) if count == size)] for each in others]
    for chosen in product([dimension], *ways):
        places = dict(zip(map(id, [first, *others]), chosen, strict=True))
        yield mapped(partial(_cut_or_doubled, places, length), arguments)


def with_one_row(arguments: Any) -> Iterator[Any]:
    """Yield the arguments with one row, and with one column, of each tensor that has the shape of another one."""
    given = [each for each in tensors(arguments) if each.layout == torch.strided]
    shapes = [each.shape for each in given]
    for value in given:
        if value.dim() > 1 and min(value.shape) > 1 and shapes.count(value.shape) > 1:
            for dimension in (0, -1):
                yield mapped(partial(_cut_or_doubled, {id(value): dimension}, 1), arguments)


def _cut_or_doubled(dimensions: dict[int, int | None], length: int, value: Any) -> Any:
    """Return a tensor with the first elements of the dimension that is noted by its identity; all else as it is.

    If it has fewer elements, other ones follow.
    """
    dimension = dimensions.get(id(value))
    if dimension is None:
        return value
    kept = value.detach()
    if length > value.shape[dimension]:
        other = kept.flip(tuple(range(kept.dim())))
        kept = torch.cat([kept, other * 0.75 if other.is_floating_point() else other], dimension)
    return kept.narrow(dimension, 0, length).clone().requires_grad_(value.requires_grad)


def scalars(arguments: Any) -> Any:
    """Return the arguments with one positive element of each tensor of the first one's shape; None as above."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.numel():
        return None

    def single(value: Tensor, _: int) -> Tensor:
        if value.shape != first.shape:
            return value
        element = value.reshape(-1)[0]
        return element.abs() if element.is_floating_point() else element  # which some kernels return as it is

    return changed_tensors(arguments, single)


def without_indices(arguments: Any) -> Any:
    """Return the arguments without indices, and without what belongs to each index; None if there are none."""
    given = [leaf for leaf in tensors(arguments) if leaf.dim()]
    counts = {leaf.shape[0] for leaf in given[1:] if leaf.dtype in WHOLE}
    if not counts:
        return None

    def shorten(value: Tensor, _: int) -> Tensor:
        belongs = value.data_ptr() != given[0].data_ptr() and value.dim() and value.shape[0] in counts
        return value[:0] if belongs else value

    return changed_tensors(arguments, shorten)


def of_images(arguments: Any) -> Any:
    """Return the arguments with a fourth dimension of the first tensor if it has three; None if it has not."""
    (first, *others), options = arguments
    if not isinstance(first, Tensor) or first.dim() != 3 or not first.is_floating_point():
        return None
    image = torch.stack([first.detach(), first.detach() / 2], -1)
    return (image.requires_grad_(first.requires_grad), *others), options


def cropped(arguments: Any) -> Any:
    """Return the arguments with one column less, and one row less of images; None if the first has no such."""
    (first, *others), options = arguments
    if not isinstance(first, Tensor) or first.dim() < 3 or min(first.shape[2:]) < 3:
        return None
    least = first.detach()[..., :-1].clone()
    if first.dim() > 3:
        least = least.narrow(-2, 0, first.shape[-2] - 1).clone()
    return (least.requires_grad_(first.requires_grad), *others), options


def of_points(arguments: Any) -> Any:
    """Return the arguments of a convolution with a kernel of one point."""
    (first, weight, *others), options = arguments
    point = (..., *[slice(1)] * (weight.dim() - 2))
    return (first, weight[point], *others), options


def expanded(arguments: Any, dimension: int, *, fractions: bool = True) -> Any:
    """Return the arguments with the first row, or the first column, in place of all: memory that is read repeatedly.

    Of fractions, or of the indices and masks beside them. None if the first tensor is none of fractions, or none of
    these has several rows.
    """
    first, places = arguments[0][0], list[int]()
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.layout != torch.strided:
        return None
    for value in tensors(arguments):
        if value.layout == torch.strided and value.is_floating_point() == fractions and value.dim() and value.numel():
            places.append(id(value))
    chosen = [first] if fractions else [each for each in tensors(arguments) if id(each) in places]
    if all(not each.dim() or each.shape[dimension] < 2 for each in chosen):
        return None

    def expand(value: Any) -> Any:
        if id(value) not in places:
            return value
        alone = value.detach().narrow(dimension, 0, 1).clone()
        return alone.expand(value.shape).requires_grad_(value.requires_grad)

    return mapped(expand, arguments)


def changed_tensors(arguments: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Return the arguments with each tensor changed by a function of it and the number of rows; None without rows."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.dim() or first.layout != torch.strided:
        return None

    def apply(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        return change(value.detach(), first.shape[0]).clone().requires_grad_(value.requires_grad)

    return mapped(apply, arguments)


def memory_of(results: list[Tensor], arguments: Any) -> list[tuple[bool, bool]]:
    """Return for each result whether it shares memory with an argument, and whether its own elements do."""
    dense = [each for each in tensors(arguments) if each.layout == torch.strided and each.numel()]
    taken = {each.untyped_storage().data_ptr() for each in dense}
    found = []
    for each in results:
        if each.layout != torch.strided or not each.numel():
            found.append((False, False))
        else:
            expanded = any(size > 1 and not stride for size, stride in zip(each.shape, each.stride(), strict=True))
            found.append((each.untyped_storage().data_ptr() in taken, expanded))
    return found


def memory_differs(found: tuple[bool, bool], right: tuple[bool, bool]) -> Iterator[str]:
    """Yield in words how a result's memory, as `memory_of` returns it, differs from the right one's."""
    if found[0] and not right[0]:
        yield "shares memory with an argument, and that of the CPU does not"
    if right[0] and not found[0]:
        yield "is a copy, and that of the CPU is a view"
    if found[1] and not right[1]:
        yield "has elements that share memory, and that of the CPU has none"


@lru_cache(maxsize=16)
def drawn_weights(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return weights of a result on the host, the same for every device, in values that every dtype has."""
    generator = torch.Generator().manual_seed(shape.numel())
    weights, *imaginary = (
        torch.randint(1, 9, shape, generator=generator) / 4 - 1.125 for _ in range(1 + dtype.is_complex)
    )
    return torch.complex(weights, *imaginary).to(dtype) if imaginary else weights.to(dtype)


def same_but_for_rounding(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values, but for rounding."""
    if one.shape != other.shape:
        return False
    if one.layout != torch.strided or one.is_complex() or torch.equal(one, other):
        return True
    close = _UNITS * torch.finfo(one.dtype).eps if one.dtype.is_floating_point else 0.0
    return torch.allclose(one.detach().double(), other.detach().double(), rtol=close, atol=0.0, equal_nan=True)
