"""Arguments of an operator on which its options have an effect: a kernel that ignores one is right on all others."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, starmap
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.layouts import drawn_weights, mapped, placed, tensors, wide
from accelcore.testing.support.samples import needs_lapack

_MOST_SAMPLES, _MOST_CHANGED, _MOST_REVALUED = 12, 2, 12  # of an option
_MOST_ELEMENTS = 2**13  # of the results of a number beyond the sizes
_MOST_DIMENSIONS = 8
OF_FORM = (
    *("dtype", "layout", "memory_format", "non_blocking", "copy", "requires_grad", "sparse", "sparse_grad", "stable"),
)
"""Options that say where or how a result is stored, or whether it has gradients: other tests look at those."""

_SEEN = 1e-4  # relative: what a kernel in fp32 cannot have lost by rounding


def with_effect(info: Any, dtype: torch.dtype, chosen: list[Any], pool: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each option, and word or switch, without effect on the chosen, with arguments on which it has one, or None.

    These are other samples, or samples with other values: infinities, NaN, equal, larger, ordered ones.

    Args:
        info: the operator's OpInfo.
        dtype: of the arguments.
        chosen: arguments that are compared already.
        pool: arguments of the operator's samples.
    """
    done, left = set(), dict[Any, None]()
    for arguments in chosen:
        differs = _Differs(info, dtype, arguments)
        for what, without in _without_each(arguments):
            if what[0] in OF_FORM:
                continue
            if what not in done and differs.without(without):
                done.add(what)
            left[what] = None
    for what in [each for each in left if each not in done]:
        having, usual = (
            [each for each in group if any(what == other for other, _ in _without_each(each))]
            for group in (pool, chosen)
        )
        first = usual[:_MOST_CHANGED]
        changed = (change(each) for change in _changes(info) for each in first)
        fewer = (other for each in first for _, other in _without_each(each))  # an option may hide another one
        revalued = [*fewer, *(other for each in first for other in _revalued(each))]
        both = (change(each) for change in (_nearly_equal, *_changes(info)) for each in revalued[:_MOST_REVALUED])
        for arguments in chain(having[:_MOST_SAMPLES], changed, revalued, both):
            differs = _Differs(info, dtype, arguments)
            if any(differs.without(without) for other, without in _without_each(arguments) if other == what):
                yield what, arguments
                break
        else:
            yield what, None


def beyond_sizes(info: Any, chosen: list[Any]) -> Iterator[Any]:
    """Yield arguments with whole numbers beyond the sizes of all dimensions, once for each option, and once below 0.

    Kernels do not check all arguments of functions that torch does not document, nor that windows have no size below 0.
    """
    done = set()
    signs: tuple[int, ...] = (1,) if info.name.startswith("nn.functional.") else (1, -1)
    with suppress(AttributeError):
        signs = signs if attrgetter(info.name)(torch).__doc__ else ()
    for (first, *given), named in chosen:
        beyond = 2 + max((size for each in tensors((first, *given)) for size in each.shape), default=0)
        for place, value in (*enumerate(given), *named.items()):
            for sign in signs if type(value) is int else ():
                changed = _replaced(((first, *given), named), place, sign * beyond)
                if (place, sign) not in done and _runs(info, changed):
                    done.add((place, sign))
                    yield changed


def from_behind(info: Any, dtype: torch.dtype, chosen: list[Any]) -> Iterator[Any]:
    """Yield arguments with dimensions that count from the last one, of options that have no such number."""
    options = [(place, each) for arguments in chosen for place, each in _options_of(arguments)]
    done = {place for place, each in options if any(number < 0 for number in _numbers(each))}
    for arguments in chosen:
        first, most = arguments[0][0], _MOST_DIMENSIONS
        dimensions = first.dim() if isinstance(first, Tensor) else 0
        for place, value in _options_of(arguments):
            numbers = _numbers(value)
            if place in done or not 0 < max(numbers, default=0) < min(most, dimensions):
                continue  # of dimension 0 a kernel that knows no negative ones may be right
            changed = [number - dimensions for number in numbers]
            negative = _replaced(arguments, place, changed[0] if type(value) is int else type(value)(changed))
            if not _Differs(info, dtype, arguments).without(negative):
                done.add(place)
                yield negative


def _options_of(arguments: Any) -> Iterator[tuple[Any, Any]]:
    (_, *given), named = arguments
    yield from (*enumerate(given), *named.items())


def _numbers(value: Any) -> list[int]:
    """Return the whole numbers of an option; none if it has other values."""
    several = value if type(value) in (tuple, list) else [value]
    return list(several) if all(type(each) is int for each in several) else []


def _replaced(arguments: Any, place: Any, value: Any) -> Any:
    (first, *given), named = arguments
    if isinstance(place, str):
        return (first, *given), {**named, place: value}
    return (first, *given[:place], value, *given[place + 1 :]), named


def is_documented(name: str) -> bool:
    """Return whether torch documents a function or method: kernels of others need not check their arguments."""
    found = False
    for owner in (torch, torch.Tensor):
        with suppress(AttributeError):
            found |= bool(attrgetter(name)(owner).__doc__)
    return found


def results_of(info: Any, arguments: Any) -> list[torch.Size]:
    """Return the shapes of an operator's results; none if it does not take the arguments, or returns nothing."""
    try:
        given, options = placed(arguments, torch.device("cpu"), "")
        return [each.shape for each in tensors(info.op(*given, **options))]
    except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
        return []


def _runs(info: Any, arguments: Any) -> bool:
    shapes = results_of(info, arguments)
    return bool(shapes) and sum(map(math.prod, shapes)) < _MOST_ELEMENTS


def _without_each(arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Yield for each option its name or place with its value, and the arguments without it.

    The value is given if it is a word or, of an option by place, a switch: each may be ignored where the other is not.
    """
    (first, *given), named = arguments
    for name, value in named.items():
        yield (name, _word(value)), ((first, *given), {key: each for key, each in named.items() if key != name})
    for place, value in enumerate(given):
        if not tensors(value):
            what = (place, str(value) if isinstance(value, bool) else _word(value))
            if place == len(given) - 1:
                yield what, ((first, *given[:-1]), named)
            for other in _plain(value):
                yield what, _replaced(arguments, place, other)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _plain(value: Any) -> list[Any]:
    """Return the values that a kernel may take for an option that it ignores."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [each for each in (0, 1) if each != value]
    if isinstance(value, tuple | list) and value and all(isinstance(each, int) for each in value):
        return [type(value)([each] * len(value)) for each in (0, 1) if set(value) != {each}]
    return []


def _revalued(arguments: Any) -> Iterator[Any]:
    """Yield the arguments with another value of each option: of switches and numbers."""
    for place, value in _options_of(arguments):
        for other in _values_beside(value):
            yield _replaced(arguments, place, other)


def _values_beside(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if value is None or isinstance(value, float):
        return [each for each in (0.3, 3.0) if each != value]
    numbers = _numbers(value)
    if type(value) is int:
        return [each for each in (1, 2, 3) if each != value]
    return [type(value)([each] * len(numbers)) for each in (1, 2, 3)] if numbers else []


def _nearly_equal(arguments: Any) -> Any:
    """Return the arguments with other tensors of the first one's shape that are close to it, or NaN where it is."""
    first = arguments[0][0]
    if not isinstance(first, Tensor) or not first.is_floating_point() or first.numel() < 2:
        return arguments
    if first.layout != torch.strided:
        return arguments
    base = first.detach().clone(memory_format=torch.contiguous_format)
    base.view(-1)[-1] = math.nan
    steps = torch.arange(first.numel()).reshape(first.shape) * 2.0**-8

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != first.shape or not value.is_floating_point():
            return value
        return (base if value is first else base + base * steps).to(value.dtype)

    return mapped(change, arguments)


class _Differs:
    """Comparison of an operator with some arguments, in float64 on the CPU, with those without one of them.

    Args:
        info, dtype, arguments: of the operator.
    """

    def __init__(self, info: Any, dtype: torch.dtype, arguments: Any) -> None:
        self._info, self._dtype = info, dtype
        self._right = cache(lambda: list(self._steps(arguments)))

    def without(self, arguments: Any) -> bool:
        """Return whether the operator has other results or gradients on these arguments, or does not run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                right = self._right()
            except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
                return False
            try:  # gradients last: mostly the results differ already
                return not all(starmap(_all_alike, zip(right, self._steps(arguments), strict=True)))
            except Exception:  # noqa: BLE001  as above
                return True

    def _steps(self, arguments: Any) -> Iterator[list[Tensor]]:
        """Yield the results with the arguments that are written, and then the gradients."""
        given, options = placed(wide(arguments, self._dtype), torch.device("cpu"), "", graph=True)
        torch.default_generator.manual_seed(0)
        found = tensors(self._info.op(*given, **options))
        written = [each for each in tensors((given, options)) if each._version]  # as running statistics
        yield [each.detach() for each in found + written]
        leaves = [leaf for leaf in tensors((given, options)) if leaf.requires_grad]
        roots = [root for root in found if root.requires_grad and not root.is_complex()]
        gradients: Sequence[Tensor | None] = ()
        if leaves and roots:
            weights = [drawn_weights(root.shape, root.dtype) for root in roots]
            gradients = torch.autograd.grad(roots, leaves, weights, allow_unused=True)
        yield [each for each in gradients if each is not None]


def _all_alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(_alike, some, others))


def _alike(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout) or one.layout != torch.strided:
        return one.layout != torch.strided
    return torch.allclose(one, other, rtol=_SEEN, atol=_SEEN**2, equal_nan=True)


def _changes(info: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield functions that return arguments with other values.

    Only data are NaN or infinite: of coordinates, and in LAPACK, they may crash the process.
    """
    if not needs_lapack(info):
        for spoil in (_spoiled, lambda value: torch.full_like(value, -math.inf)):
            yield partial(_with_first, spoil)
    for change in _CHANGES:
        yield partial(mapped, partial(_fractions, change))


def _with_first(change: Callable[[Tensor], Tensor], arguments: Any) -> Any:
    (first, *others), options = arguments
    return (mapped(partial(_fractions, change), first), *others), options


def _fractions(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.numel() < 2:
        return value
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        return value
    return change(value.detach()).requires_grad_(value.requires_grad)


def _spoiled(value: Tensor) -> Tensor:
    spoiled = value.flatten().clone()
    for place, number in enumerate((math.nan, math.inf, -math.inf), 1):
        spoiled[place::7] = number
    return spoiled.reshape(value.shape)


_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.round,
    lambda value: value * 8,
    lambda value: value / 8,
    lambda value: value.sort(-1)[0],
    lambda value: value.sort(-1, descending=True)[0],
    torch.zeros_like,
)
