"""Variants of an operator's samples in one dtype: of other options, sizes, layouts and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.bulk import of_many, of_shared_dimensions
from accelcore.testing.support.coverage import (
    arguments_of,
    convolutions,
    joined,
    of_other_options,
    with_indices_that_occur,
)
from accelcore.testing.support.found import INFINITE, LARGE, OF_GRADIENT, OTHERWISE, SMALL, Variant
from accelcore.testing.support.layouts import (
    BEHIND,
    MARKED,
    emptied,
    expanded,
    of_images,
    of_points,
    scalars,
    tensors,
    without_indices,
)
from accelcore.testing.support.rare import rare
from accelcore.testing.support.samples import (
    CHOOSES,
    DECIDED,
    MEDIANS,
    NOT_UNIQUE,
    OF_ELEMENTS,
    ORDERED,
    READS_MEMORY,
    REPEATABLE,
    ROUGH,
    SAMPLED,
    UNIQUE_INDICES,
    UNWRITTEN,
    defines_infinities,
    needs_lapack,
    samples,
)
from accelcore.testing.support.values import (
    multiplied,
    repeated,
    with_infinity,
    with_nans,
    with_nothing_of,
    with_numbers,
    with_one_number,
    with_short_indices,
    with_whole_numbers,
)
from accelcore.testing.support.wrapped import Between, Gradient, Twice

_MOST_INDICES = 8
_WRITES = ("scatter", "index_copy", "index_put", "index_reduce", "put")  # of equal indices, any number may be last
_OF_MANY_RESULTS = ("unbind", "split", "unbind_copy")  # of which larger ones take long
_MOST_ENLARGED = 8  # samples, of an operator that scripts use less
_ANY_NUMBERS = (*OF_ELEMENTS, "ReductionOpInfo")
"""torch's kinds of operators that take infinities and NaN: a decomposition of a matrix may not end."""

_OPEN_IN_LOW = ("conv", "attention")
"""Operators that multiply infinities in low precision by zeros of a padding or a mask, or do not: kernels differ."""

_OUTS = (BEHIND, "strided", "transposed", "strided")
"""Layouts of tensors given as `out=`, in turn; every second variant has arguments behind other elements, too."""


@dataclass(frozen=True)
class Variants:
    """Variants of an operator's samples in one dtype; each method yields those of a kind, if it is apt.

    Attributes:
        name, info, dtype: the operator, its OpInfo, and the dtype.
        count: how many samples to take; twice as many in fp32, and one of whole numbers.
        alone: whether each element has been compared on numbers of every size.
    """

    name: str
    info: Any
    dtype: torch.dtype
    count: int
    alone: bool = False

    @cached_property
    def every(self) -> list[Any]:
        """All of torch's samples."""
        return samples(self.info, self.dtype)

    @cached_property
    def chosen(self) -> list[Any]:
        """The samples that are compared in all forms."""
        floating = self.count if self.dtype.is_floating_point else 1
        most = 2 * self.count if self._is_fp32 else floating
        return self.every[:: max(1, -(-len(self.every) // most))]

    @property
    def _is_fp32(self) -> bool:
        return self.dtype == torch.float32

    @property
    def _is_elementwise(self) -> bool:
        return type(self.info).__name__ in OF_ELEMENTS

    @property
    def _is_compared_widely(self) -> bool:
        return self.name in SAMPLED and self.name not in ROUGH

    @cached_property
    def _options(self) -> list[Any]:
        """Arguments of which each shows another option."""
        return list(of_other_options(self.info, self.dtype, self.every, []))

    @property
    def _typical(self) -> Any:
        return arguments_of(max(self.every, key=_weight))  # the first of the best

    def usual(self) -> Iterator[Variant]:
        """Yield torch's samples, in fp32 with each option; of indices also repeated ones."""
        cases = [*self._resized(), *self._with_each_option(), *self._repeated()]
        for number, (arguments, what) in enumerate(cases):
            turn = number % len(_OUTS) if self.name in SAMPLED else 0
            yield Variant(self.info, self.dtype, arguments, what, aside=turn % 2 == 1, out=_OUTS[turn])

    def _resized(self) -> Iterator[tuple[Any, str]]:
        """Yield the chosen samples, some of them also of no elements and of one."""
        first = next((each for each in self.chosen if isinstance(each.input, Tensor) and each.input.dim()), None)
        for sample in self.chosen:
            arguments = arguments_of(sample)
            yield arguments, "broadcast" if sample.broadcasts_input else ""
            if self._is_fp32 and not self._is_elementwise:
                is_resized = True
            else:
                is_resized = sample is first and (self._is_fp32 or not self.dtype.is_floating_point)
            if is_resized and self.name not in UNWRITTEN:
                for change, what in ((emptied, "of no elements"), (scalars, "of one element")):
                    if (changed := change(arguments)) is not None:
                        yield changed, what

    def _with_each_option(self) -> Iterator[tuple[Any, str]]:
        if not (self._is_fp32 and self.name in SAMPLED):
            return
        yield from ((each, "") for each in of_other_options(self.info, self.dtype, self.every, self.chosen))
        for factor in ("alpha", "beta"):
            changed = (with_nothing_of(arguments_of(sample), factor) for sample in self.every)
            yield from ((each, f"with {factor}=0") for each in islice(filter(None, changed), 1))
        changes = (without_indices, of_images, *([of_points] if "conv" in self.name else []))
        for change in () if self._is_elementwise else changes:
            changed = (change(arguments_of(sample)) for sample in self.every)
            yield from ((each, "") for each in islice(filter(None, changed), self.count))

    def _repeated(self) -> Iterator[tuple[Any, str]]:
        if self.name not in REPEATABLE:
            return
        found = filter(None, (repeated(arguments_of(sample)) for sample in self.every))
        again = list(islice(found, self.count))
        yield from ((each, "of repeated indices") for each in again)
        short = (with_short_indices(each) for each in again if self._is_fp32)
        yield from ((each, "of short indices") for each in short if each is not None)

    def low(self) -> Iterator[Variant]:
        """Yield half of all options in bf16 and the other half in fp16, some with large numbers."""
        if self.dtype not in (torch.bfloat16, torch.float16) or not self._is_compared_widely:
            return
        half = self.dtype == torch.float16
        chosen = of_other_options(self.info, self.dtype, self.every, self.chosen)
        options = [*chosen, *convolutions(self.name, self.dtype)]
        for number, given in enumerate(options, half):
            what, changed = (LARGE, multiplied(given, 8.0)) if number % 2 else (OTHERWISE, given)
            yield Variant(self.info, self.dtype, changed or given, what)
        pairs = list(joined(self.info, self.dtype, self.every))
        for given in [*pairs, *with_indices_that_occur(options + pairs, _MOST_INDICES)][half::2]:
            yield Variant(self.info, self.dtype, given, OTHERWISE)

    def large_and_small(self) -> Iterator[Variant]:
        """Yield a sample with large numbers, and in fp32 with small ones."""
        if self.alone or not self.dtype.is_floating_point or not self._is_compared_widely:
            return
        plain = next((each for each in self.every if _weight(each) == 2), self.every[0])  # no fractions among options
        small = self._is_fp32 and "norm" not in self.name  # small rows are normalized by eps, and noise
        for what, times in ((LARGE, 100.0), *([(SMALL, 2.0**-13)] * small)):
            if (changed := multiplied(arguments_of(plain), times)) is not None:
                yield Variant(self.info, self.dtype, changed, what)

    def rare(self) -> Iterator[Variant]:
        """Yield in fp32 what scripts rarely give."""
        if self._is_fp32:
            yield from rare(self.name, self.info, self.dtype, self.every, self.chosen)

    def many(self) -> Iterator[Variant]:
        """Yield many elements: in fp32 in all ways, else in two, of which one in bf16 and the other one in fp16."""
        if not self._is_compared_widely or self.name in UNIQUE_INDICES:
            return
        if self._is_fp32:
            pool = [*map(arguments_of, self.every), *self._options]
            yield from of_many(self.name, self.info, self.dtype, pool, writes=True)
        elif self.name not in _OF_MANY_RESULTS:
            pool = list(map(arguments_of, self.every[:_MOST_ENLARGED]))
            which = {torch.bfloat16: (0, 1), torch.float16: (1, 2)}.get(self.dtype, (0, 2))
            yield from islice(of_many(self.name, self.info, self.dtype, pool), *which)

    def of_other_memory(self) -> Iterator[Variant]:
        """Yield in fp32 expanded and marked memory, and calls between others."""
        if not (self._is_fp32 and self._is_compared_widely):
            return
        yield from self.expanded((0, -1))
        if self.name not in READS_MEMORY:
            yield Variant(self.info, self.dtype, self._typical, OTHERWISE, MARKED)
        yield self.between_calls()

    def expanded(self, dimensions: tuple[int, ...]) -> Iterator[Variant]:
        """Yield arguments of which all rows, or all columns, lie in the same memory."""
        for arguments in _expanded(self.name, self.every, dimensions):
            yield Variant(self.info, self.dtype, arguments, "of expanded memory")

    def between_calls(self) -> Variant:
        """Return a call between others on arguments of the same shapes with other values."""
        return Variant(Between(self.info), self.dtype, self._typical, "between other calls")

    def pairs(self) -> Iterator[Variant]:
        """Yield in fp32 two operands with whole numbers, with one number, and one tensor as both."""
        if not self._is_fp32 or type(self.info).__name__ != "BinaryUfuncInfo":
            return
        if self._is_compared_widely:
            if (changed := with_whole_numbers(self._typical)) is not None:
                yield Variant(self.info, self.dtype, changed, "with whole numbers")
            for given in with_one_number(self._options):
                yield Variant(self.info, self.dtype, given, "of one number")
        if (alone := _alone(self.every)) is not None:
            yield Variant(Twice(self.info), self.dtype, alone, "of one tensor twice")

    def with_shared_dimensions(self) -> Iterator[Variant]:
        """Yield in fp32 four dimensions, some of which have size 1 in one tensor, as those of a mask."""
        if self._is_fp32 and self._is_compared_widely:
            for arguments in of_shared_dimensions(self.info, map(arguments_of, self.every)):
                yield Variant(self.info, self.dtype, arguments, OTHERWISE)

    def with_numbers(self) -> Iterator[Variant]:
        """Yield numbers in place of all tensors but the first, also beside NaN."""
        if not self.dtype.is_floating_point or not self._is_compared_widely:
            return
        for given in with_numbers(map(arguments_of, self.every)):
            yield Variant(self.info, self.dtype, given, OTHERWISE, writes=True)
            yield from (Variant(self.info, self.dtype, each, "with NaN") for each in with_nans(self.info.op, [given]))

    def second_derivatives(self) -> Iterator[Variant]:
        """Yield in fp32 the gradient as the operator, of the first sample and of the options of most dimensions."""
        if self._is_fp32 and self._is_compared_widely and self.info.supports_gradgrad:
            most = sorted(self._options, key=lambda given: -max((each.dim() for each in tensors(given)), default=0))
            for given in [arguments_of(self.every[0]), *most[:3]]:
                yield Variant(Gradient(self.info), self.dtype, given, OF_GRADIENT)

    def not_finite(self) -> Iterator[Variant]:
        """Yield infinities and NaN; in bf16 and fp16, whose kernels may be others, one of each."""
        if self.alone or self.name in ROUGH or not defines_infinities(self.name):
            return
        any_numbers = self.name.startswith("nn.functional.") or type(self.info).__name__ in _ANY_NUMBERS
        sampled = self.name in SAMPLED and self.dtype.is_floating_point
        is_low = self.dtype.is_floating_point and self.dtype.itemsize == 2
        if not (sampled or (self._is_fp32 and any_numbers) or (is_low and not needs_lapack(self.info))):
            return
        most = None if self._is_fp32 else 1
        plane = arguments_of(max(self.every, key=_is_plane))
        is_open = not self._is_fp32 and any(each in self.name for each in _OPEN_IN_LOW)
        infinities = [] if is_open else list(INFINITE.items())
        for what, infinity in infinities[self.dtype == torch.float16 :][:most]:
            if (changed := with_infinity(plane, infinity, several=self.name not in CHOOSES)) is not None:
                yield Variant(self.info, self.dtype, changed, what)
        weighted = list(map(arguments_of, sorted(self.every, key=_weight, reverse=True)))
        if "attention" not in self.name:
            weighted += joined(self.info, self.dtype, self.every)
        for given in with_nans(self.info.op, weighted)[:most]:
            yield Variant(self.info, self.dtype, given, "with NaN")

    def much(self, *, brief: bool) -> Iterator[Variant]:
        """Yield many elements and expanded rows, of an operator outside of `SAMPLED`, and a call between others."""
        if not self.every or self.name in ROUGH:
            return
        if not needs_lapack(self.info) and self.name not in (*UNWRITTEN, *_OF_MANY_RESULTS):
            count = 1 if brief else 2 if self._is_elementwise else 3
            given = map(arguments_of, self.every[:_MOST_ENLARGED])
            yield from islice(of_many(self.name, self.info, self.dtype, given), count)
            yield from self.expanded((0,))
        yield self.between_calls()

    def typical(self) -> Iterator[Variant]:
        """Yield the sample with the most options, and in low precision one with an infinity, or with NaN."""
        if self.name in ROUGH or not self.every:
            return
        yield Variant(self.info, self.dtype, self._typical, OTHERWISE)
        if self.dtype.itemsize == 2 and not needs_lapack(self.info):
            found = list(self.not_finite())
            yield from found[:1] if self.dtype == torch.bfloat16 else found[-1:]


def _weight(sample: Any) -> int:
    """Return more for a sample of several elements with a fraction among its options than for others."""
    several = isinstance(sample.input, Tensor) and sample.input.numel() > 1
    numbers = any(isinstance(value, float) for value in (*sample.args, *sample.kwargs.values()))
    return 2 * several + numbers


def _is_plane(sample: Any) -> bool:
    return isinstance(sample.input, Tensor) and sample.input.dim() > 1 and min(sample.input.shape) > 1


def _expanded(name: str, every: list[Any], dimensions: tuple[int, ...]) -> Iterator[Any]:
    """Yield the first sample of which all rows, and then all columns, lie in the same memory; then of its indices.

    Of indices that may come several times, one sample for each of its whole numbers, such as a dimension, in which they
    do.
    """
    if name in (*DECIDED, *READS_MEMORY, *NOT_UNIQUE, *MEDIANS):
        return
    ways = [True] * (name not in ORDERED or name in CHOOSES)
    ways += [False] * (name in REPEATABLE or not name.startswith(_WRITES))
    for fractions, dimension in product(ways, dimensions):
        found = (expanded(arguments_of(sample), dimension, fractions=fractions) for sample in every)
        yield from islice((arguments for arguments in found if arguments is not None), 1)
    again = filter(None, map(repeated, map(arguments_of, every if name in REPEATABLE else ())))
    by_numbers = {tuple(each for each in given[0] if isinstance(each, int)): given for given in again}
    for given, dimension in product(by_numbers.values(), (0, -1)):
        if (arguments := expanded(given, dimension, fractions=False)) is not None:
            yield arguments


def _alone(every: list[Any]) -> Any:
    """Return the first of two operands of one shape."""
    for sample in every:
        other = sample.args[0] if sample.args else None
        if isinstance(other, Tensor) and other.shape == sample.input.shape and other.numel() > 1:
            return (sample.input, *sample.args[1:]), sample.kwargs
    return None
