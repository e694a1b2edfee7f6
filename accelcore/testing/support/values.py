"""Arguments of an operator with other values: infinities, equal numbers, repeated indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.layouts import WHOLE, changed_tensors, mapped, placed, tensors, wide

_INTEGERS = (torch.int8, torch.uint8, torch.int16, *WHOLE)
_ROUGH_IN_FP32 = 2**28  # of the whole numbers behind it, fp32 has every 32nd
_MOST_PARTS = 64  # numbers that may be offsets
_NUMBERS = (-1.5, 2.5, 0.5, 1.5)
_MOST_TRIED = 8  # arguments of an operator, until a NaN shows in its results


def _with_nan(arguments: Any, *, period: int = 2**31) -> Any:
    """Return the arguments without gradients, and with NaN as the second element of each period of the first tensor.

    None if it has no second element.
    """
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.numel() < 2:
        return None
    where = torch.arange(first.numel()).reshape(first.shape) % period == 1

    def spoil(value: Tensor, _: int) -> Tensor:
        return value.masked_fill(where, float("nan")) if value.data_ptr() == first.data_ptr() else value

    changed = changed_tensors(arguments, spoil)
    return changed and mapped(lambda value: value.detach() if isinstance(value, Tensor) else value, changed)


def with_nans(operator: Callable[..., Any], every: Iterable[Any]) -> list[Any]:
    """Return the first of several arguments with NaN, and the first ones of which the operator passes it on, if others.

    A window with gaps may leave the element out, and a power of 0 has no use for it: every second one is NaN then.
    Then the first ones with each other value of a switch or word follow, such as `largest=False`.
    """
    pool = list(every)
    given = pool[:_MOST_TRIED]
    first, *others = [each for each in map(_with_nan, given) if each is not None] or [None]
    if first is None:
        return []
    found = [first]
    if not _passes_on(operator, first):
        many = filter(None, (_with_nan(each, period=2) for each in given))
        found += islice((each for each in chain(others, many) if _passes_on(operator, each)), 1)
    seen = set().union(*map(_switches, found))
    for arguments in pool:
        if not _switches(arguments) <= seen and (changed := _with_nan(arguments)) is not None:
            seen |= _switches(arguments)
            found.append(changed)
    return found


def _switches(arguments: Any) -> set[tuple[Any, bool | str]]:
    """Return the options that are switches or words, by place or name."""
    given, named = arguments
    return {(place, value) for place, value in (*enumerate(given), *named.items()) if isinstance(value, bool | str)}


def _passes_on(operator: Callable[..., Any], arguments: Any) -> bool:
    given, options = placed(wide(arguments, torch.float32), torch.device("cpu"), "")  # where the oracle computes
    try:
        found = tensors(operator(*given, **options))
    except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
        return False
    return any(bool(each.isnan().any()) for each in found)


def with_complex_zeros(arguments: Any) -> Any:
    """Return the arguments without gradients, and with zeros among the parts of the first, of complex numbers, or None.

    One of four numbers is 0, one is real and one imaginary.
    """
    first = arguments[0][0]
    if not isinstance(first, Tensor) or first.layout != torch.strided or not first.is_complex():
        return None
    if not first.dim() or first.numel() < 4:
        return None
    parts = torch.view_as_real(first.detach().resolve_conj().clone(memory_format=torch.contiguous_format)).view(-1)
    for place in (0, 1, 3, 4):
        parts[place::8] = 0.0
    zeros = torch.view_as_complex(parts.view(*first.shape, 2))
    return mapped(
        lambda value: zeros if value is first else value.detach() if isinstance(value, Tensor) else value, arguments
    )


def with_bounds(arguments: Any, least: float, most: float) -> Any:
    """Return the arguments with both ends of a range among the fractions within it, in all pairs of two tensors.

    None if the first tensor is none of several fractions, or has others.
    """
    first = arguments[0][0]

    def within(value: Any) -> bool:
        if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
            return False
        return value.dim() > 0 and value.numel() > 1 and bool(((value >= least) & (value <= most)).all())

    def change(value: Any) -> Any:
        if not within(value):
            return value
        flat = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
        if math.isfinite(most - least):  # close to an end a gradient may lose all digits
            flat.clamp_(least + (most - least) / 8, most - (most - least) / 8)
        for place, number in enumerate((least, least, most, most) if value is first else (least, most)):
            flat[place :: 5 if value is first else 2] = number
        return flat.reshape(value.shape).requires_grad_(value.requires_grad)

    return mapped(change, arguments) if within(first) else None


def all_alike(arguments: Any, *, counted: bool) -> Iterator[Any]:
    """Yield the arguments with masks that choose everything, and nothing; with `counted`, also numbers that do."""
    first = arguments[0][0]

    def change(value: Any, number: int) -> Any:
        if not isinstance(value, Tensor) or not (value.dtype == torch.bool or (counted and value is first)):
            return value
        return torch.full_like(value.detach(), number)

    if counted or any(each.dtype == torch.bool for each in tensors(arguments)):
        yield from (mapped(partial(change, number=number), arguments) for number in (1, 0))


def with_infinity(arguments: Any, infinity: float, *, several: bool = True) -> Any:
    """Return the arguments with a row and one more element of the first that are infinite; of a vector, two elements.

    With `several=False` it is the first element alone, for operators that choose one of equal numbers. None if there
    are fewer than two rows, or than two elements in a row.
    """
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or not first.dim() or min(first.shape) < 2:
        return None
    count = first.shape[-1] if first.dim() > 1 else 1
    where = torch.arange(first.numel()).reshape(first.shape) <= count * several

    def spoil(value: Tensor, _: int) -> Tensor:
        return value.masked_fill(where, infinity) if value.data_ptr() == first.data_ptr() else value

    return changed_tensors(arguments, spoil)


def with_ends(arguments: Any) -> Any:
    """Return the arguments with the least and the largest whole number in the first; None if it has no two elements."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.dim() or first.numel() < 2 or first.dtype not in _INTEGERS:
        return None
    info, place = torch.iinfo(first.dtype), first.data_ptr()
    least = info.min + (info.bits > 16)  # divided by -1, the least number of 32 bits ends the process

    def change(value: Tensor, _: int) -> Tensor:
        if value.data_ptr() != place:
            return value
        flat = value.reshape(-1).clone()
        flat[0], flat[1] = least, info.max
        return flat.reshape(value.shape)

    return changed_tensors(arguments, change)


def with_long_numbers(arguments: Any) -> Any:
    """Return the arguments with numbers in the first that need more than 32 bits; None if it has no two elements.

    Their lowest 32 bits are those of the numbers before.
    """
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.dim() or first.numel() < 2 or first.dtype != torch.int64:
        return None
    place = first.data_ptr()
    return changed_tensors(arguments, lambda each, _: each * (2**32 + 1) if each.data_ptr() == place else each)


def with_close_numbers(arguments: Any) -> Any:
    """Return the arguments with whole numbers that fp32 rounds to one another; None if some of them are places."""
    if "sorter" in arguments[1]:
        return None
    return changed_tensors(arguments, lambda each, _: each + _ROUGH_IN_FP32 if each.dtype == torch.int64 else each)


def with_nothing_of(arguments: Any, factor: str) -> Any:
    """Return the arguments with 0 as one of the factors `beta` and `alpha`, and 1 as the other; None without them.

    The first tensor is NaN if `beta` is 0, because its elements have to be ignored then.
    """
    (first, *others), options = arguments
    if "beta" not in options or not first.is_floating_point():
        return None
    if factor == "beta":
        first = torch.full_like(first, float("nan")).requires_grad_(first.requires_grad)
    return (first, *others), {**options, "alpha": 1, "beta": 1, factor: 0}


def multiplied(arguments: Any, factor: float) -> Any:
    """Return the arguments with `factor` times the first tensor; None if it has no fractions."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    place = first.data_ptr()
    return changed_tensors(arguments, lambda each, _: each * factor if each.data_ptr() == place else each)


def with_whole_numbers(arguments: Any) -> Any:
    """Return two operands of which the second has whole numbers from 1 on; None if there are no two of fractions."""
    (first, *others), options = arguments
    if not others or not isinstance(others[0], Tensor) or not others[0].is_floating_point():
        return None
    whole = others[0].detach().abs().clamp(max=9).int() + 1
    return (first.detach(), whole, *others[1:]), options


def with_numbers(pool: Iterable[Any]) -> Iterator[Any]:
    """Yield arguments with numbers in place of the tensors of fractions but the first, of each set of their places."""
    done = set[tuple[int, ...]]()
    for (first, *others), options in pool:
        places = tuple(n for n, each in enumerate(others) if isinstance(each, Tensor) and each.is_floating_point())
        if places and places not in done and isinstance(first, Tensor) and first.numel() > 1:
            done.add(places)
            numbers = iter(_NUMBERS)
            yield (first, *(next(numbers) if n in places else each for n, each in enumerate(others))), options


def with_one_number(pool: Iterable[Any]) -> Iterator[Any]:
    """Yield operands of which the second has no dimensions, of all arguments with two operands that have some."""
    for (first, *others), options in pool:
        if others and isinstance(others[0], Tensor) and others[0].numel() and first.dim():
            yield (first, others[0].detach().reshape(-1)[0].clone(), *others[1:]), options


def others_of(arguments: Any) -> Any:
    """Return arguments of the same shapes with other values: elements in reverse order, other fractions."""

    def change(value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.detach().clone()
            return value.flip(tuple(range(value.dim()))) if value.is_floating_point() else value
        return value * 0.75 if isinstance(value, float) else value

    return mapped(change, arguments)


def repeated(arguments: Any) -> Any:
    """Return the arguments with indices of which the second half is the first index again; None without indices."""
    if not any(leaf.dtype in WHOLE and leaf.numel() > 1 for leaf in tensors(arguments)):
        return None

    def repeat(value: Tensor, _: int) -> Tensor:
        if value.dtype not in WHOLE or value.numel() < 2:
            return value
        flat = value.reshape(-1).clone()
        flat[flat.numel() // 2 :] = flat[0]
        return flat.reshape(value.shape)

    return changed_tensors(arguments, repeat)


def with_masks_of_members(arguments: Any) -> list[Any]:
    """Return the arguments with a mask for each image or sequence, and for each channel or head, of all alike.

    There are none if no option is a mask of two dimensions, which all have in common.
    """
    (first, *_), options = arguments
    names = [key for key, each in options.items() if "mask" in key and isinstance(each, Tensor) and each.dim() == 2]
    if not names or first.dim() != 4:
        return []
    found, (members, parts) = [], first.shape[:2]
    for shape in ((members, 1), (1, parts)):
        numbers = torch.linspace(-1, 1, members * parts)[: max(shape)].view(*shape, 1, 1)
        masks = {name: options[name].detach() * numbers.to(options[name].dtype) for name in names}
        found.append((arguments[0], {**options, **masks}))
    return found


def with_negative_indices(arguments: Any) -> Any:
    """Return the arguments with indices that count from the end; None if there are none, or there is nothing."""
    first, *others = tensors(arguments)
    if not first.numel() or not any(leaf.dtype == torch.int64 for leaf in others):
        return None
    least = min(first.shape, default=1)

    def change(value: Tensor, _: int) -> Tensor:
        if value.dtype != torch.int64 or value.data_ptr() == first.data_ptr():
            return value
        return -1 - torch.arange(value.numel()).view(value.shape) % least  # not twice the same, if there are enough

    return changed_tensors(arguments, change)


def with_short_indices(arguments: Any) -> Any:
    """Return the arguments with indices of 32 bits; None without indices."""
    if not any(leaf.dtype == torch.int64 and leaf.numel() for leaf in tensors(arguments)):
        return None
    return changed_tensors(arguments, lambda value, _: value.int() if value.dtype == torch.int64 else value)


def with_empty_parts(arguments: Any) -> Any:
    """Return the arguments with the first of ascending whole numbers twice, as offsets of an empty part are.

    None if there are none.
    """
    whole = [each for each in tensors(arguments)[1:] if each.dtype in WHOLE and each.dim() == 1]
    several = [each for each in whole if 1 < len(each) <= _MOST_PARTS and bool(each[0] < each[-1])]
    ascending = [each for each in several if bool((each.diff() >= 0).all())]
    if not ascending:
        return None

    def change(value: Any) -> Any:
        return torch.cat([value[:1], value]) if any(value is each for each in ascending) else value

    return mapped(change, arguments)


def with_equal_numbers(arguments: Any) -> Any:
    """Return the arguments with all fractions rounded, so that several are the same."""
    return changed_tensors(arguments, lambda value, _: value.round() if value.is_floating_point() else value)
