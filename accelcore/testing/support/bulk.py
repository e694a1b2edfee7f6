"""Arguments of an operator with many elements: beyond the widths of vectors, and the parts of threads and grids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.found import MANY, Variant
from accelcore.testing.support.layouts import MIXED, WHOLE, changed_tensors, mapped, placed, tensors, with_one_row
from accelcore.testing.support.samples import OF_ELEMENTS, READS_MEMORY, REPEATABLE

_MANY, _MOST = (70_001, 4099, 2051, 300), 2**17
"""Sizes of an enlarged dimension, and the most elements of a tensor then."""

_ROWS, _COLUMNS = 257, 259
_LONG = _ROWS * _COLUMNS
"""Elements of a lengthened tensor: no multiple of what processors take at once."""

_FEW = 12
"""Elements, and times the size of an enlarged dimension, by which it is first tried whether arguments may fit."""

_MOST_ELEMENTS = 2**17  # of its results
_MOST_LONG = 2  # vectors of other options
_IMAGES = (2, 3, 4, 5)
_SHARED = ((1, 2), (0, 2), (2,), (1, 3))  # dimensions of size 1, such as those of a mask that heads share
_MOST_RESULTS = 10  # of an enlarged sample


def of_many(
    name: str, info: Any, dtype: torch.dtype, pool: Iterable[Any], *, writes: bool = False
) -> Iterator[Variant]:
    """Yield an operator on many elements: as they are, in other strides, of other options.

    Args:
        name, info: the operator and its OpInfo.
        dtype, pool: arguments of that dtype, to be made larger.
        writes: whether it is also run in place and with `out=`.
    """
    every, elementwise = list(pool), type(info).__name__ in OF_ELEMENTS
    long = _lengthened(info, sorted(every, key=_tensors_of_one_shape, reverse=True), elementwise)
    first = next(long, None)
    if first is not None:
        yield Variant(info, dtype, first, MANY)
        matrices = mapped(lambda value: value.view(_ROWS, -1) if _is_long(value) else value, first)
        yield Variant(info, dtype, matrices, MANY, "transposed", writes=writes)
        yield from (Variant(info, dtype, each, MANY) for each in islice(long, _MOST_LONG))
        several = sum(map(_is_long, tensors(first))) > 1
        yield Variant(info, dtype, matrices, MANY, MIXED if several else "strided")
        for each in with_one_row(matrices):
            if _keeps_shape(info, each):
                yield Variant(info, dtype, each, MANY)
    if not elementwise:
        for number, each in enumerate(_of_rows_and_columns(name, info, every)):
            yield Variant(info, dtype, each, MANY)
            if not number and name not in READS_MEMORY and tensors(each)[0].dim() > 1:
                yield Variant(info, dtype, each, MANY, "transposed")


def of_shared_dimensions(info: Any, pool: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments of four dimensions, some of which have size 1 in one tensor and are wider in the others."""
    several = (given for given in pool if _tensors_of_one_shape(given) > 1)
    many = filter(None, (lengthened(given, math.prod(_IMAGES)) for given in several))
    long = next((given for given in many if _keeps_shape(info, given)), None)
    for value, shared in product([each for each in tensors(long) if each.dim()], _SHARED):
        yield mapped(partial(_as_images, id(value), shared), long)


def _as_images(place: int, shared: tuple[int, ...], value: Any) -> Any:
    """Return a long tensor as images; with one element of the shared dimensions if the tensor has that identity."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    images = value.detach().view(_IMAGES)
    for dimension in shared if id(value) == place else ():
        images = images.narrow(dimension, 0, 1)
    return images.clone().requires_grad_(value.requires_grad)


def _lengthened(info: Any, pool: list[Any], elementwise: bool) -> Iterator[Any]:
    """Yield a long vector of each signature, if there is one result of its shape."""
    done = set()
    for given in pool:
        signature = _signature(given, of_values=True)
        few = None if signature in done else lengthened(given, _FEW)  # which takes less time
        # torch does not list all functions that take each element alone as such.
        if few is not None and (elementwise or _keeps_shape(info, few)):
            long = lengthened(given)
            if elementwise or _keeps_shape(info, long):
                done.add(signature)
                yield long


def _tensors_of_one_shape(arguments: Any) -> int:
    shapes = [each.shape for each in tensors(arguments) if each.dim()]
    return len(shapes) if len({*shapes}) == 1 else 0


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == _LONG


def _signature(arguments: Any, *, of_values: bool) -> tuple[Any, ...]:
    """Return the number and names of arguments, with values of switches and words among them if that is asked for."""
    given, options = arguments
    names = (f"{key}={value}" if of_values and isinstance(value, bool | str) else key for key, value in options.items())
    return len(given), *sorted(names)


def _of_rows_and_columns(name: str, info: Any, pool: list[Any]) -> Iterator[Any]:
    """Yield for rows and columns the first enlarged arguments of each signature, if they fit."""
    done = set()
    indexed = name in REPEATABLE
    ways = (False, True) if indexed else (False,)
    for by_index, dimension, given, everywhere in product(ways, (0, -1), pool, (False, True)):
        # For rows each value of an option, for columns each option.
        signature = by_index, dimension, *_signature(given, of_values=not dimension)
        if signature not in done:
            enlarge = partial(enlarged, given, dimension, everywhere=everywhere, indices=indexed, by_index=by_index)
            if (few := enlarge(times=_FEW)) is not None and not _fits(info, few):
                continue
            if (arguments := enlarge()) is not None and _fits(info, arguments):
                done.add(signature)
                yield arguments


def _keeps_shape(info: Any, arguments: Any) -> bool:
    """Return whether the operator has one result, of the shape of its first argument; False if torch cannot say it."""
    given, options = placed(arguments, torch.device("meta"), "")  # a result may be too large to compute
    try:
        return [each.shape for each in tensors(info.op(*given, **options))] == [given[0].shape]
    except Exception:  # noqa: BLE001  arguments that no longer fit together
        return False


def _fits(info: Any, arguments: Any) -> bool:
    """Return whether the operator takes the arguments, and its results are few, not empty and not too large."""
    for place in ("meta", "cpu"):  # a result whose shape depends on values has no kernel without them
        given, options = placed(arguments, torch.device(place), "")
        try:
            results = tensors(info.op(*given, **options))
            return len(results) <= _MOST_RESULTS and 0 < sum(each.numel() for each in results) <= _MOST_ELEMENTS
        except NotImplementedError:
            continue
        except Exception:  # noqa: BLE001  arguments that no longer fit together
            return False
    return False


def enlarged(
    arguments: Any, dimension: int, *, everywhere: bool, indices: bool, by_index: bool = False, times: int = 0
) -> Any:
    """Return the arguments with thousands of rows or columns; None if there are none, or would be too many elements.

    Elements come again, a little larger each time, so that the largest is among the last.

    Args:
        arguments: of which the first tensor has rows.
        dimension: 0 for rows, -1 for columns. In other tensors it is enlarged if it is of the same size.
        everywhere: whether every other dimension of that size is enlarged, too.
        indices: whether whole numbers are indices into it.
        by_index: whether the first tensor of indices counts instead of the first tensor: there are more indices then.
        times: how many times as many there are instead of thousands.
    """
    given = tensors(arguments)
    firsts = [leaf for leaf in given if leaf.dtype in WHOLE] if by_index else arguments[0][:1]
    first = next(iter(firsts), None)
    if not isinstance(first, Tensor) or not first.dim() or first.shape[dimension] < 2 or not first.numel():
        return None
    size = first.shape[dimension]

    def which(value: Tensor) -> list[int]:
        of_size = [number for number, count in enumerate(value.shape) if count == size]
        return of_size if everywhere else [number for number in of_size if number == dimension % value.dim()]

    sizes = [times * size] if times else _MANY
    fits = (each for each in sizes if all(t.numel() * (each / size) ** len(which(t)) <= _MOST for t in given))
    many = next(fits, None)
    if many is None:
        return None

    def grow(value: Tensor, _: int) -> Tensor:
        numbers = which(value)
        if indices and not by_index and value.dtype in WHOLE:
            value = value * (many // size)
        for number in numbers:
            value = value.index_select(number, torch.arange(many) % size)
            if value.is_floating_point():
                shape = [many if each == number else 1 for each in range(value.dim())]
                value = value * torch.linspace(0.5, 1, many).to(value.dtype).reshape(shape)
        return value

    return changed_tensors(arguments, grow)


def lengthened(arguments: Any, count: int = _LONG) -> Any:
    """Return the arguments as tensors of one dimension, with more elements than a grid has blocks, or `count`.

    Elements come again, a little larger each time. None if tensors differ in shape.
    """
    given = [leaf for leaf in tensors(arguments) if leaf.dim()]
    if len({leaf.shape for leaf in given}) != 1 or not given[0].numel():
        return None
    where = torch.arange(count) % given[0].numel()

    def lengthen(value: Tensor, _: int) -> Tensor:
        if not value.dim():
            return value
        long = value.reshape(-1)[where]
        return long * torch.linspace(0.5, 1, count).to(value.dtype) if value.is_floating_point() else long

    return changed_tensors(arguments, lengthen)
