"""Comparison of a device's operators with the same operators in float64 on the CPU, on torch's own samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, permutations, product
from typing import Any

import torch
from torch import Tensor

from accelcore.known_faults import KnownFault
from accelcore.testing.support.bulk import of_many
from accelcore.testing.support.case import Case
from accelcore.testing.support.coverage import (
    arguments_of,
    convolutions,
    joined,
    of_other_options,
    with_indices_that_occur,
)
from accelcore.testing.support.found import INFINITE, LARGE, OF_GRADIENT, OTHERWISE, SMALL, Found, is_refusal
from accelcore.testing.support.layouts import (
    BEHIND,
    MARKED,
    emptied,
    expanded,
    mapped,
    of_images,
    of_points,
    placed,
    scalars,
    tensors,
    without_indices,
)
from accelcore.testing.support.numbers import compare_numbers
from accelcore.testing.support.rare import Rare, in_wider_dtypes, rare
from accelcore.testing.support.samples import (
    CHOOSES,
    DECIDED,
    MEDIANS,
    NOT_UNIQUE,
    OF_ELEMENTS,
    OF_ITS_INPUT,
    ORDERED,
    READS_MEMORY,
    REPEATABLE,
    ROUGH,
    SAMPLED,
    UNIQUE_INDICES,
    UNWRITTEN,
    defines_infinities,
    needs_lapack,
    operators,
    samples,
)
from accelcore.testing.support.values import (
    multiplied,
    repeated,
    with_infinity,
    with_nans,
    with_nothing_of,
    with_one_number,
    with_short_indices,
    with_whole_numbers,
)
from accelcore.testing.support.wrapped import Between, Gradient, Twice

_MOST_WRONG, _MOST_INDICES = 4, 8
_WRITES = ("scatter", "index_copy", "index_put", "index_reduce", "put")  # of equal indices, any number may be last
_OF_MANY_RESULTS = ("unbind", "split", "unbind_copy")  # of which larger ones take long
_MOST_ENLARGED = 8  # samples, of an operator that scripts use less
_ANY_NUMBERS = (*OF_ELEMENTS, "ReductionOpInfo")
"""torch's kinds of operators that take infinities and NaN: a decomposition of a matrix may not end."""

_OPEN_IN_LOW = ("conv", "attention")
"""Operators that multiply infinities in low precision by zeros of a padding or a mask, or do not: kernels differ."""

_SWITCH = (False, True)


def compare(
    device: torch.device, name: str, info: Any, dtypes: list[torch.dtype], count: int, faults: Sequence[KnownFault] = ()
) -> Found:
    """Compare an operator in each of the dtypes that it has on the CPU: values, gradients, in place and `out=`.

    Results have to share memory with arguments where those of the CPU do, and nowhere else.

    It seeds torch's generators, which some operators do themselves; the caller restores them.

    Args:
        device: where to run it.
        name, info: the operator and its OpInfo.
        dtypes: what to try; an operator that has none of them is run in one dtype that it has. With float64, which is
            the oracle's, only results that are asked for in it are compared.
        count: how many of its samples to run in each dtype; twice as many in fp32, and one of whole numbers.
        faults: the device's known bugs.
    """
    found, known = Found(faults), info.supported_dtypes("cpu")
    kind = type(info).__name__
    binary = kind == "BinaryUfuncInfo"
    elementwise = kind in OF_ELEMENTS
    asked, dtypes = dtypes, [dtype for dtype in dtypes if dtype != torch.float64]
    if name in ROUGH:
        dtypes = [dtype for dtype in dtypes if dtype == torch.float32]
    alone = compare_numbers(found, device, name, info, dtypes, count - 1)
    for dtype in [dtype for dtype in dtypes if dtype in known] or sorted(known, key=str)[:1]:
        every = samples(info, dtype)
        most = 2 * count if dtype == torch.float32 else count if dtype.is_floating_point else 1
        chosen = every[:: max(1, -(-len(every) // most))]
        first = next((each for each in chosen if isinstance(each.input, Tensor) and each.input.dim()), None)
        if dtype == torch.float32 and not elementwise:
            resized = chosen
        else:
            resized = [first] if dtype == torch.float32 or not dtype.is_floating_point else []
        resized = [] if name in UNWRITTEN else resized
        cases = [case for each in chosen for case in _cases(each, resized=any(each is other for other in resized))]
        if dtype == torch.float32 and name in SAMPLED:
            cases += [(each, "") for each in of_other_options(info, dtype, every, chosen)]
            for factor in ("alpha", "beta"):
                changed = (with_nothing_of(arguments_of(sample), factor) for sample in every)
                cases += [(each, f"with {factor}=0") for each in islice(filter(None, changed), 1)]
            for change in () if elementwise else (without_indices, of_images, *([of_points] if "conv" in name else [])):
                changed = (change(arguments_of(sample)) for sample in every)
                cases += [(each, "") for each in islice(filter(None, changed), count)]
        if name in REPEATABLE:
            again = [each for sample in every if (each := repeated(arguments_of(sample))) is not None][:count]
            cases += [(each, "of repeated indices") for each in again]
            short = (with_short_indices(each) for each in again if dtype == torch.float32)
            cases += [(each, "of short indices") for each in short if each is not None]
        for number, (arguments, what) in enumerate(cases):
            turn = number % 4 if name in SAMPLED else 0
            out = (BEHIND, "strided", "transposed", "strided")[turn]
            Case(found, device, name, info, dtype, arguments, what, elementwise, turn % 2 == 1, out).run()
            if len(found.wrong) > _MOST_WRONG:
                return found
        if dtype.is_floating_point and name in SAMPLED and name not in ROUGH:
            if dtype in (torch.bfloat16, torch.float16):  # each of them half of the options
                half = dtype == torch.float16
                options = [*of_other_options(info, dtype, every, chosen), *convolutions(name, dtype)]
                for number, given in enumerate(options, half):
                    what, changed = (LARGE, multiplied(given, 8.0)) if number % 2 else (OTHERWISE, given)
                    Case(found, device, name, info, dtype, changed or given, what, elementwise).run()
                pairs = list(joined(info, dtype, every))
                for given in [*pairs, *with_indices_that_occur(options + pairs, _MOST_INDICES)][half::2]:
                    Case(found, device, name, info, dtype, given, OTHERWISE, elementwise).run()
            plain = next((each for each in every if _weight(each) == 2), every[0])  # several elements, no fractions
            small = dtype == torch.float32 and "norm" not in name  # small rows are normalized by eps, and noise
            for what, times in () if alone else ((LARGE, 100.0), *([(SMALL, 2.0**-13)] * small)):
                if (changed := multiplied(arguments_of(plain), times)) is not None:
                    Case(found, device, name, info, dtype, changed, what, elementwise).run()
        if dtype == torch.float32:
            _compare_rare(found, device, name, rare(name, info, dtype, every, chosen))
            if name in SAMPLED and name not in ROUGH:
                given = [*map(arguments_of, every), *of_other_options(info, dtype, every, [])]
                if name not in UNIQUE_INDICES:
                    many = of_many(name, info, dtype, given, elementwise, writes=True)
                    _compare_rare(found, device, name, many)
                for arguments in _expanded(name, every):
                    Case(found, device, name, info, dtype, arguments, "of expanded memory", elementwise).run()
                given = arguments_of(max(every, key=_weight))  # the first of the best
                if name not in READS_MEMORY:
                    Case(found, device, name, info, dtype, given, OTHERWISE, elementwise, layout=MARKED).run()
                Case(found, device, name, Between(info), dtype, given, "between other calls", elementwise).run()
                if binary and (changed := with_whole_numbers(given)) is not None:
                    Case(found, device, name, info, dtype, changed, "with whole numbers", elementwise).run()
                for given in with_one_number(of_other_options(info, dtype, every, []) if binary else ()):
                    Case(found, device, name, info, dtype, given, "of one number", elementwise).run()
                if info.supports_gradgrad:
                    for given in [arguments_of(every[0]), *islice(_of_other_dimensions(info, dtype, every), 3)]:
                        Case(found, device, name, Gradient(info), dtype, given, OF_GRADIENT, elementwise).run()
            if binary and (alone := _alone(every)) is not None:
                Case(found, device, name, Twice(info), dtype, alone, "of one tensor twice", elementwise).run()
        elif name in SAMPLED and name not in (*ROUGH, *UNIQUE_INDICES, *_OF_MANY_RESULTS):
            many = of_many(name, info, dtype, map(arguments_of, every[:_MOST_ENLARGED]), elementwise)
            # One of them in bf16, the other one in fp16, which are computed alike.
            which = {torch.bfloat16: (0, 1), torch.float16: (1, 2)}.get(dtype, (0, 2))
            _compare_rare(found, device, name, islice(many, *which))
        in_fp32 = dtype == torch.float32 and (name.startswith("nn.functional.") or kind in _ANY_NUMBERS)
        in_low = dtype.is_floating_point and dtype.itemsize == 2 and not needs_lapack(info)
        if ((name in SAMPLED and dtype.is_floating_point) or in_fp32 or in_low) and name not in ROUGH and not alone:
            for what, given in _not_finite(name, info, dtype, every):
                Case(found, device, name, info, dtype, given, what, elementwise).run()
    floating = [each for each in dtypes if each.is_floating_point and each in known]
    _compare_rare(found, device, name, in_wider_dtypes(name, info, asked))
    if binary:
        _compare_dtypes(found, device, name, info, _of_two_dtypes(floating))
    elif name in SAMPLED and floating and name not in OF_ITS_INPUT:
        _compare_dtypes(found, device, name, info, _of_several_dtypes(floating, samples(info, floating[-1])))
    return found


def compare_options(
    device: torch.device,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype] = (),
    faults: Sequence[KnownFault] = (),
    *,
    brief: bool = False,
) -> Found:
    """Compare operators on samples that show each of their options, many elements, and each of `dtypes`; see `compare`.

    The options are those in fp32, or in another dtype of an operator that has no fp32. If it is `brief`, one layout
    stands for the others, as in `rare`.
    """
    found = Found(faults)
    for name in names:
        info = operators()[name]
        known = info.supported_dtypes("cpu")
        for dtype in sorted(known, key=lambda each: (each != torch.float32, str(each)))[:1]:
            every = samples(info, dtype)
            _compare_rare(found, device, name, rare(name, info, dtype, every, [], brief=brief))
            _compare_rare(found, device, name, _of_much(name, info, dtype, every, brief=brief))
        _compare_rare(found, device, name, in_wider_dtypes(name, info, dtypes))
        alone = compare_numbers(found, device, name, info, [*dict.fromkeys((torch.float32, *dtypes))], 1)
        for dtype in dtypes if name not in ROUGH else ():
            if dtype in known and dtype not in (torch.float32, torch.float64) and (every := samples(info, dtype)):
                given = arguments_of(max(every, key=_weight))
                _compare_rare(found, device, name, [Rare(info, dtype, given, OTHERWISE)])
                if not alone and not needs_lapack(info) and dtype.itemsize == 2:
                    cases = [Rare(info, dtype, each, what) for what, each in _not_finite(name, info, dtype, every)]
                    _compare_rare(found, device, name, cases[:1] if dtype == torch.bfloat16 else cases[-1:])
    return found


def _of_much(name: str, info: Any, dtype: torch.dtype, every: list[Any], *, brief: bool) -> Iterator[Rare]:
    """Yield an operator on many elements, and between calls on arguments of the same shapes with other values."""
    if not every or name in ROUGH:
        return
    if not needs_lapack(info) and name not in (*UNWRITTEN, *_OF_MANY_RESULTS):
        elementwise = type(info).__name__ in OF_ELEMENTS
        given = map(arguments_of, every[:_MOST_ENLARGED])
        count = 1 if brief else 2 if elementwise else 3
        yield from islice(of_many(name, info, dtype, given, elementwise), count)
        for arguments in _expanded(name, every, (0,)):
            yield Rare(info, dtype, arguments, "of expanded memory")
    yield Rare(Between(info), dtype, arguments_of(max(every, key=_weight)), "between other calls")


def _not_finite(name: str, info: Any, dtype: torch.dtype, every: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield samples with infinities and NaN; in bf16 and fp16, whose kernels may be others, one of each."""
    if not defines_infinities(name):
        return
    plane, is_low = arguments_of(max(every, key=_is_plane)), dtype != torch.float32
    infinities = [] if is_low and any(each in name for each in _OPEN_IN_LOW) else list(INFINITE.items())
    for what, infinity in infinities[dtype == torch.float16 :][: 1 if is_low else None]:
        if (changed := with_infinity(plane, infinity, several=name not in CHOOSES)) is not None:
            yield what, changed
    weighted = [
        *map(arguments_of, sorted(every, key=_weight, reverse=True)),
        *([] if "attention" in name else joined(info, dtype, every)),
    ]
    yield from (("with NaN", each) for each in with_nans(info.op, weighted)[: 1 if is_low else None])


def _compare_rare(found: Found, device: torch.device, name: str, cases: Iterable[Rare]) -> None:
    for case in cases:
        given = case.dtype, case.arguments, case.what
        elementwise = case.writes and type(case.info).__name__ in OF_ELEMENTS
        Case(found, device, name, case.info, *given, elementwise, layout=case.layout, writes=case.writes).run()
        if len(found.wrong) > _MOST_WRONG:
            return


def _compare_dtypes(found: Found, device: torch.device, name: str, info: Any, cases: Iterable[Any]) -> None:
    """Note where arguments of several dtypes give a result of another dtype or value than torch says."""
    for arguments in cases:
        what = " and ".join(_described(each) for each in arguments[0])
        dtypes = list[list[torch.dtype]]()
        try:
            for place in (torch.device("meta"), device):
                given, options = placed(arguments, place, "")
                dtypes.append([each.dtype for each in tensors(info.op(*given, **options))])
        except Exception as error:  # noqa: BLE001  a device raises errors of any kind
            if dtypes and not is_refusal(error):
                found.refused.append(f"{name} of {what}: {type(error).__name__}: {error}")
            continue
        if dtypes[0] != dtypes[1]:
            found.note(f"{name}, {what}: {dtypes[1]}, not {dtypes[0]}")
        elif dtypes[0][0].is_floating_point and not name.startswith("nn.functional."):  # these round on the way
            Case(found, device, name, info, dtypes[0][0], arguments, OTHERWISE, elementwise=False).run()


def _of_two_dtypes(dtypes: list[torch.dtype]) -> Iterator[Any]:
    """Yield a tensor with a number, and with a tensor without dimensions of another dtype, in all of their digits."""
    pairs = list(permutations(dtypes, 2))
    operands: list[tuple[Any, Any]] = [(_third(2).to(one), _third().to(other)) for one, other in pairs]
    operands += [(other, one) for one, other in operands]
    operands += [(_third(2).to(one), _third(2).to(other)) for one, other in pairs]
    operands += [(torch.ones(2, dtype=one), other) for one in [*dtypes, torch.int64] for other in (True, 2, 0.5)]
    yield from ((given, {}) for given in operands)


def _third(*shape: int) -> Tensor:
    return torch.full(shape, 4 / 3)


def _of_several_dtypes(dtypes: list[torch.dtype], every: list[Any]) -> Iterator[Any]:
    """Yield the sample of most tensors with one of them, as it is and without dimensions, of another dtype."""
    given = max(map(arguments_of, every), key=lambda each: len(_fractions(each)))
    places = [id(each) for each in _fractions(given)]
    for (one, other), place, alone in product(permutations(dtypes, 2), places if len(places) > 1 else (), _SWITCH):
        yield mapped(partial(_converted, places, place, one, _third().to(other) if alone else other), given)


def _converted(places: list[int], place: int, dtype: torch.dtype, other: Tensor | torch.dtype, value: Any) -> Any:
    if id(value) not in places:
        return value
    if id(value) != place:
        return value.detach().to(dtype)
    return other if isinstance(other, Tensor) else value.detach().to(other)


def _fractions(arguments: Any) -> list[Tensor]:
    return [each for each in tensors(arguments) if each.is_floating_point()]


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)


def _cases(sample: Any, *, resized: bool) -> Iterator[tuple[Any, str]]:
    arguments = arguments_of(sample)
    yield arguments, "broadcast" if sample.broadcasts_input else ""
    if not resized:
        return
    for change, what in ((emptied, "of no elements"), (scalars, "of one element")):
        changed = change(arguments)
        if changed is not None:
            yield changed, what


def _weight(sample: Any) -> int:
    """Return more for a sample of several elements with a fraction among its options than for others."""
    several = isinstance(sample.input, Tensor) and sample.input.numel() > 1
    numbers = any(isinstance(value, float) for value in (*sample.args, *sample.kwargs.values()))
    return 2 * several + numbers


def _is_plane(sample: Any) -> bool:
    return isinstance(sample.input, Tensor) and sample.input.dim() > 1 and min(sample.input.shape) > 1


def _of_other_dimensions(info: Any, dtype: torch.dtype, every: list[Any]) -> Iterator[Any]:
    """Yield arguments of which each shows another option, those of most dimensions first."""
    options = of_other_options(info, dtype, every, [])
    yield from sorted(options, key=lambda given: -max((each.dim() for each in tensors(given)), default=0))


def _expanded(name: str, every: list[Any], dimensions: tuple[int, ...] = (0, -1)) -> Iterator[Any]:
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
