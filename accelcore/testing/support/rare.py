"""Arguments that scripts rarely give an operator: of which each gives one more case, as it is and with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, combinations, cycle, islice, product
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.coverage import (
    arguments_of,
    convolutions,
    joined,
    of_other_options,
    with_indices_that_occur,
)
from accelcore.testing.support.decompositions import UNIQUE, Unique
from accelcore.testing.support.effects import beyond_sizes, from_behind, is_documented, results_of, with_effect
from accelcore.testing.support.found import (
    ALIKE,
    BOUNDS,
    COMPLEX,
    ENDS,
    EQUAL,
    FROZEN,
    INFINITE,
    LARGE,
    OTHERWISE,
    Variant,
)
from accelcore.testing.support.layouts import (
    LAYOUTS,
    MARKED,
    MIXED,
    cropped,
    mapped,
    placed,
    resized,
    tensors,
    wide,
    with_one_row,
    without_size,
)
from accelcore.testing.support.samples import (
    CHOOSES,
    CONVERTS,
    DECIDED,
    NOT_UNIQUE,
    OF_ELEMENTS,
    ORDERED,
    READS_MEMORY,
    ROUGH,
    SAMPLED,
    TIED,
    defines_infinities,
    defines_nan,
    needs_lapack,
    samples,
)
from accelcore.testing.support.values import (
    all_alike,
    repeated,
    with_bounds,
    with_close_numbers,
    with_complex_zeros,
    with_empty_parts,
    with_ends,
    with_equal_numbers,
    with_infinity,
    with_long_numbers,
    with_masks_of_members,
    with_nans,
    with_negative_indices,
)
from accelcore.testing.support.wrapped import OneResult

_MOST_RESULTS = 4  # of an operator, of which each has gradients alone
_MOST_LEAVES = 3  # of which each set is frozen
_SQUARE_OVERFLOWS = 2.0**65
_MOST_EMPTIED = _MOST_BOUNDED = 3
_MOST_WIDER = 3
_MOST_WRITTEN = 2  # samples of an operator that are also run in place and with `out=`
_MOST_SHAPES, _MOST_INDICES, _MOST_WHOLE, _MOST_MASKED = 8, 16, 8, 4  # of an operator
_OF_SHORT = ((torch.int8, 4), (torch.uint8, 1), (torch.int16, 1), (torch.int32, 1))  # samples with the ends
_WRITES = ("scatter", "index_reduce", "index_put", "put")  # by index, also several numbers to one place
_REDUCTIONS = ("add", "multiply", "sum", "prod", "mean", "amax", "amin")  # of numbers that are written to one place
_OF_IMAGES = ("pool", "interpolate", "conv", "unfold", "pad.", "shuffle")
_IN_LAYOUTS: tuple[tuple[Callable[..., Any], str], ...] = ((max, "strided"), (max, "transposed"), (min, "transposed"))
"""Of which samples, by how many options they have, another layout is compared."""
_FROM_BEHIND = ("__getitem__", "index_put", "put", "take")  # whose indices may be negative
_COUNTED = ("nonzero", "nonzero_static", "argwhere", "count_nonzero")  # of which numbers are masks
_NO_BOUNDS = ("linalg.", "bernoulli", "multinomial")  # without a gradient there, or drawn
_WIDENS_LATE = "masked."  # computes in the dtype of its argument
_COUNTS_UP = ("gamma", "zeta")  # whose kernels take a step for each whole number below 0


def rare(
    name: str, info: Any, dtype: torch.dtype, every: list[Any], chosen: list[Any], *, brief: bool = False
) -> Iterator[Variant]:
    """Yield an operator's rare cases.

    Args:
        name, info: the operator and its OpInfo.
        dtype: fp32, or another one if it has no fp32.
        every: its samples.
        chosen: those of which others are compared already; if there are none, each option of torch's samples is rare.
        brief: whether one layout, one infinity and one short integer stand for the others.
    """
    options = list(of_other_options(info, dtype, every, []))
    pairs = list(joined(info, dtype, every))
    pool = [arguments_of(sample) for sample in every]
    written = (
        [] if chosen else [*options[:_MOST_WRITTEN], *filter(None, [max(options, key=_most_options, default=None)])]
    )
    for arguments in [
        *([] if chosen else options),
        *pairs,
        *(each for _, each in with_effect(info, dtype, options + pairs, pool) if each is not None),
        *beyond_sizes(info, options),
        *_of_other_shapes(name, options),
        *(islice(_widened(info, options + pairs), _MOST_SHAPES) if is_documented(info.name) else ()),
        *islice(chain.from_iterable(map(with_masks_of_members, options)), _MOST_MASKED),
        *from_behind(info, dtype, options),
        *(_broadcast(info, pool) if is_documented(info.name) and name not in ROUGH else ()),
        *islice(filter(None, map(with_empty_parts, options + pairs)), _MOST_INDICES),
        *with_indices_that_occur(options + pairs, _MOST_INDICES),
        *(filter(None, map(repeated, filter(_combines, options + pairs))) if name.startswith(_WRITES) else ()),
        *(islice(filter(None, map(with_negative_indices, pool)), _MOST_SHAPES) if name in _FROM_BEHIND else ()),
    ]:
        yield Variant(info, dtype, arguments, OTHERWISE, writes=any(arguments is each for each in written))
    if name in SAMPLED and "attention" not in name:  # others may crash, and attention divides by the root of a size
        yield from (Variant(info, dtype, arguments, "of no elements") for arguments in _without_sizes(info, options))
    for arguments, layout in zip(convolutions(name, dtype), cycle(LAYOUTS), strict=False):
        yield Variant(info, dtype, arguments, OTHERWISE, layout)
    in_layouts = _IN_LAYOUTS[1:2] if brief else _IN_LAYOUTS
    for choose, layout in in_layouts if every and name not in READS_MEMORY else ():
        yield Variant(info, dtype, choose(options, key=_most_options), OTHERWISE, layout)
    if name in UNIQUE:
        of_both = [*options, *of_other_options(info, torch.complex64, samples(info, torch.complex64), [])]
        yield from (Variant(Unique(name, info), dtype, arguments, OTHERWISE) for arguments in of_both)
    if every and _matrices(mixed := max(pool, key=_matrices)) > 1 and name not in READS_MEMORY:
        yield Variant(info, dtype, mixed, OTHERWISE, MIXED)
    if name in ROUGH or not every:
        return
    for arguments in options:
        if (name in DECIDED or arguments[1].get("stable")) and (changed := with_equal_numbers(arguments)) is not None:
            yield Variant(info, dtype, changed, EQUAL)
            yield Variant(info, dtype, changed, EQUAL, "transposed")
    by_dimensions = {_dimensions(given): given for given in pool if tensors(given)}  # one of each number
    for changed in chain.from_iterable(all_alike(given, counted=name in _COUNTED) for given in by_dimensions.values()):
        yield Variant(info, dtype, changed, ALIKE)
    if dtype == torch.float32 and not name.startswith(_NO_BOUNDS):
        bounds = _range_of(info)
        bounded = islice(filter(None, (with_bounds(each, *bounds) for each in options)), _MOST_BOUNDED)
        yield from (Variant(info, dtype, arguments, BOUNDS) for arguments in bounded)
    if not brief:
        yield from _with_frozen_inputs(info, dtype, every)
    if info.supports_autograd and name not in (*TIED, *NOT_UNIQUE):
        given = max(pool, key=_matrices)
        count = len(results_of(info, given))
        for number in range(count) if 1 < count <= _MOST_RESULTS else ():
            yield Variant(OneResult(info, number), dtype, given, OTHERWISE)
    if dtype == torch.float32 and type(info).__name__ == "BinaryUfuncInfo":
        yield from _beside_numbers(info)
    if dtype == torch.float32 and defines_nan(name) and not (chosen or needs_lapack(info)):
        given = arguments_of(max(every, key=_elements))
        among = options if "attention" in name else options + pairs  # a mask may hide NaN, or not
        for changed in with_nans(info.op, sorted(among, key=_most_options, reverse=True)):
            yield Variant(info, dtype, changed, "with NaN")
        for what, each in islice(INFINITE.items(), 1 if brief else None) if defines_infinities(name) else ():
            if (changed := with_infinity(given, each, several=name not in CHOOSES)) is not None:
                yield Variant(info, dtype, changed, what)
    known = info.supported_dtypes("cpu") if name not in NOT_UNIQUE else ()
    for kind, most in ((torch.int64, _MOST_WHOLE), (torch.bool, 2)):
        if kind in known and dtype == torch.float32:
            yield from _of_whole_numbers(name, info, kind, most, brief=brief)
    for kind, most in _OF_SHORT[: 1 if brief else None]:
        if kind in known:
            ends = filter(None, map(with_ends, of_other_options(info, kind, samples(info, kind), [])))
            yield from (Variant(info, kind, arguments, ENDS) for arguments in islice(ends, most))
    if torch.complex64 in known and name not in CONVERTS:
        complex_ones = of_other_options(info, torch.complex64, samples(info, torch.complex64), [])
        for number, arguments in enumerate(islice(complex_ones, 2)):
            yield Variant(info, torch.float32, arguments, COMPLEX)
            if not (number or brief) and name not in READS_MEMORY:
                yield Variant(info, torch.float32, arguments, COMPLEX, MARKED)
            if not number and type(info).__name__ in OF_ELEMENTS and not any(each in name for each in _COUNTS_UP):
                (first, *others), named = arguments
                yield Variant(info, torch.float32, ((first * _SQUARE_OVERFLOWS, *others), named), LARGE)
        zeros = filter(None, (with_complex_zeros(arguments_of(each)) for each in samples(info, torch.complex64)))
        if not needs_lapack(info) and (changed := next(zeros, None)) is not None and _is_finite(info, changed):
            yield Variant(info, torch.float32, changed, COMPLEX)


def in_wider_dtypes(name: str, info: Any, dtypes: Iterable[torch.dtype]) -> Iterator[Variant]:
    """Yield samples with `dtype=`, of a dtype that is wider than the sample's: the result must have its digits."""
    known = info.supported_dtypes("cpu") if name not in NOT_UNIQUE and not name.startswith(_WIDENS_LATE) else set()
    for narrow, wider in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        if {narrow, wider} <= {*dtypes} & known:
            given = [mapped(_without_gradient, arguments_of(sample)) for sample in samples(info, narrow)]
            given.sort(key=lambda each: -sum(tensor.numel() for tensor in tensors(each)))
            asked = [(values, {**named, "dtype": wider}) for values, named in given[:_MOST_WIDER]]
            yield from (Variant(info, wider, each, OTHERWISE) for each in asked if results_of(info, asked[0]))


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _combines(arguments: Any) -> bool:
    """Return whether numbers that are written to one place are combined, because of a word or a switch."""
    (_, *given), named = arguments
    values = [*given, *named.values()]
    return any(isinstance(each, str) and each in _REDUCTIONS for each in values) or any(each is True for each in given)


def _range_of(info: Any) -> tuple[float, float]:
    """Return the range of numbers that an operator takes; that of probabilities if torch does not say it."""
    least, most = getattr(info, "domain", None) or (None, None)
    return (0.0, 1.0) if least is None or most is None else (float(least), float(most))


def _of_whole_numbers(name: str, info: Any, kind: torch.dtype, most: int, *, brief: bool) -> Iterator[Variant]:
    """Yield samples of whole numbers with each option, in turn in other strides, and numbers that fp32 cannot hold."""
    every = samples(info, kind)
    options = [*islice(of_other_options(info, kind, every, []), most), *islice(joined(info, kind, every), most)]
    others = ("",) if brief or name in READS_MEMORY else ("strided", "transposed", "")
    for arguments, layout in chain(product(options[:1], others), zip(options[1:], cycle(others), strict=False)):
        yield Variant(info, kind, arguments, OTHERWISE, layout)
    for arguments in options[:most] if kind != torch.bool else ():
        if (changed := with_long_numbers(arguments)) is not None:
            yield Variant(info, kind, changed, LARGE)
            break
    for arguments in options if name in (*DECIDED, *ORDERED, *CHOOSES) and kind == torch.int64 else ():
        if (changed := with_close_numbers(arguments)) is not None:
            yield Variant(info, kind, changed, OTHERWISE)


def _of_other_shapes(name: str, options: list[Any]) -> Iterator[Any]:
    """Yield arguments of images of other sizes."""
    if any(each in name for each in _OF_IMAGES):
        yield from islice(filter(None, map(cropped, options)), _MOST_SHAPES)


def _widened(info: Any, options: list[Any]) -> Iterator[Any]:
    """Yield arguments with two images, channels, rows and columns where there is one, which hides wrong strides."""
    if type(info).__name__ in OF_ELEMENTS:
        return
    for given in options:
        first, changed = next(iter(tensors(given)), torch.empty(0)), given
        for dimension in (n for n, size in enumerate(first.shape) if size == 1 and first.dim() > 2 and first.numel()):
            shapes = results_of(info, changed)
            others = (each for each in resized(changed, dimension, 2) if results_of(info, each) not in ([], shapes))
            changed = next(others, changed)
        if changed is not given:
            yield changed


def _is_finite(info: Any, arguments: Any) -> bool:
    """Return whether an operator has finite results in double precision, in which the oracle computes."""
    given, options = placed(wide(arguments, torch.float32), torch.device("cpu"), "")
    try:
        return all(bool(each.isfinite().all()) for each in tensors(info.op(*given, **options)))
    except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
        return False


def _without_sizes(info: Any, options: list[Any]) -> Iterator[Any]:
    """Yield arguments with an empty dimension of which the result has elements: sums of nothing."""
    by_dimensions = {_dimensions(given): given for given in options if tensors(given)}
    for given in islice(by_dimensions.values(), _MOST_EMPTIED):
        if all(each.layout == torch.strided for each in tensors(given)):
            found = (each for each in without_size(given) if 0 < sum(map(math.prod, results_of(info, each))) < 2**10)
            yield from islice(found, _MOST_EMPTIED)


def _broadcast(info: Any, pool: list[Any]) -> Iterator[Any]:
    """Yield arguments of which one tensor is as wide as the others only if its row or column comes again."""
    given = max(pool, key=_matrices_alike, default=None)
    shapes = results_of(info, given)
    yield from (each for each in with_one_row(given) if shapes and results_of(info, each) == shapes)


def _beside_numbers(info: Any) -> Iterator[Variant]:
    """Yield tensors with a number as the other operand."""
    for kind, number in ((torch.float32, 3), (torch.int64, 2.5), (torch.int64, 3)):
        first = next((each for (each, *_), _ in of_other_options(info, kind, samples(info, kind), [])), None)
        if first is not None:
            yield Variant(info, kind, ((first, number), {}), OTHERWISE, writes=True)


def _with_frozen_inputs(info: Any, dtype: torch.dtype, every: list[Any]) -> Iterator[Variant]:
    """Yield the sample of most arguments with every set of them that needs gradients, but none and all."""
    given = arguments_of(max(every, key=lambda sample: len(tensors(arguments_of(sample)))))
    leaves = [number for number, each in enumerate(tensors(given)) if each.requires_grad]
    for count in range(1, len(leaves)) if len(leaves) <= _MOST_LEAVES else ():
        for frozen in combinations(leaves, count):
            yield Variant(info, dtype, _frozen(given, frozen), FROZEN)


def _frozen(arguments: Any, numbers: tuple[int, ...]) -> Any:
    places = {id(tensors(arguments)[number]) for number in numbers}
    return mapped(lambda each: each.detach() if id(each) in places else each, arguments)


def _dimensions(arguments: Any) -> tuple[int, ...]:
    return tuple(each.dim() for each in tensors(arguments))


def _most_options(arguments: Any) -> int:
    given, named = arguments
    return len(given) + len(named)


def _matrices(arguments: Any) -> int:
    shapes = [each.shape for each in tensors(arguments) if each.dim() > 1 and min(each.shape[-2:]) > 1]
    return 2 * len(shapes) - len({*shapes})


def _matrices_alike(arguments: Any) -> int:
    shapes = [each.shape for each in tensors(arguments) if each.dim() > 1 and min(each.shape) > 1]
    return max(map(shapes.count, shapes), default=0)


def _elements(sample: Any) -> int:
    return min([each.numel() for each in tensors(arguments_of(sample))], default=0)
