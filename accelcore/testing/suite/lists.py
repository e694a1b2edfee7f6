"""Conformance of operators on lists of tensors (`torch._foreach_*`), by which optimizers, clipping and scalers work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.found import Found, is_refusal, known_faults
from accelcore.testing.support.layouts import mapped
from accelcore.util.text import first_line

_MANY = 331  # tensors: a kernel takes some dozens, or some hundreds, in one launch
_LARGE = 70_001
_UNITS, _OF_SUMS = 8, 1e-5  # how far a result may be off: in units of the dtype, and of many numbers

_UNFIT = ("mm",)  # of matrices, which these lists do not hold
_NOT_EMPTY = ("max", "inf")  # a largest number of nothing is an error
_NUMBERS = {"exponent": 2.0, "weight": 0.25}
_OPTIONS: dict[str, tuple[float, ...]] = {"alpha": (0.5,), "value": (0.5,), "ord": (1, math.inf)}
"""Values of options beside their defaults, by name."""


@dataclass(frozen=True)
class _Call:
    """How an operator on lists is called, by its schema.

    Attributes:
        operator, overload: its name.
        arguments: names and types of what it is given by place.
        options: what it is given by name.
    """

    operator: str
    overload: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, float], ...] = ()

    @property
    def forms(self) -> list[str]:
        """Names of its forms in torch: as it is, and in place."""
        names = [name for end in ("", "_") if hasattr(torch, name := f"_foreach_{self.operator}{end}")]
        return [name for name in names if self.overload in getattr(torch.ops.aten, name).overloads()]

    @property
    def takes_several(self) -> bool:
        """Whether it takes several lists of tensors."""
        return sum(kind == "List[Tensor]" for _, kind in self.arguments) > 1

    def __call__(self, form: Callable[..., Any], given: list[list[Any]]) -> Any:
        """Call a form of the operator with as many of three lists of tensors as it takes, and with numbers."""
        *lists, numbers = given
        first, following = lists[0][0], iter(lists)
        values = [self._argument(*each, first, following, numbers) for each in self.arguments]
        return form(*values, **dict(self.options))

    def _argument(self, name: str, kind: str, first: Tensor, lists: Iterator[Any], numbers: list[float]) -> Any:
        if kind == "List[Tensor]":
            return next(lists)
        if kind == "List[number]":
            return numbers
        if (name, kind) == ("scalars", "Tensor"):  # which torch takes on the host only
            return torch.tensor(numbers)
        number = _NUMBERS.get(name, 2.5)
        return torch.full((), number, device=first.device, dtype=first.dtype) if kind == "Tensor" else number


def _calls() -> Iterator[tuple[str, _Call]]:
    """Yield each overload of torch's operators on lists, as it is and with each value of an option."""
    for name in sorted(each for each in dir(torch) if each.startswith("_foreach_")):
        operator = name.removeprefix("_foreach_").removesuffix("_")
        if operator in _UNFIT or (name.endswith("_") and hasattr(torch, name[:-1])):
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            every = getattr(packet, overload)._schema.arguments
            if any(each.is_out for each in every):
                continue
            arguments = tuple((each.name, str(each.type)) for each in every if not each.has_default_value())
            what = operator if overload == "default" else f"{operator}.{overload}"
            yield what, _Call(operator, overload, arguments)
            for option in (each.name for each in every if each.has_default_value()):
                for value in _OPTIONS.get(option, ()):
                    yield f"{what}, {option}={value}", _Call(operator, overload, arguments, ((option, value),))


_CALLS = dict(_calls())


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


@lru_cache(maxsize=32)
def _lists(count: int, dtype: torch.dtype, other: torch.dtype, *, with_empty: bool) -> list[list[Any]]:
    """Return three lists of tensors of many sizes, of which the first is of `dtype`; and numbers.

    Some tensors lie in other strides than those of the other lists.
    """
    generator = torch.Generator().manual_seed(count)
    sizes = [max((number - 3) % 100, 0 if with_empty else 1) for number in range(count)]
    shapes: list[tuple[int, ...]] = [((), (size,), (2, 5), (size,))[number % 4] for number, size in enumerate(sizes)]
    if count == _MANY:
        shapes[-2] = (_LARGE,)
    a, b, c = ([torch.randn(shape, generator=generator).to(kind) for shape in shapes] for kind in (dtype, other, other))
    for first, every in ((2, a), (6, b)):
        every[first::8] = [each.t().contiguous().t() for each in every[first::8]]
    if count > 1:
        a[1][0], a[-2][-1] = math.nan, -math.inf
    c = [each.abs() + 0.5 for each in c]
    return [a, [each.abs() + 1 for each in b], c, [1.0 + number % 5 for number in range(count)]]


class ListTests:
    """The part of `TestOperators` that is about lists."""

    @pytest.mark.parametrize("what", _CALLS)
    def test_lists(self, accel: Backend, what: str, record_property: Any) -> None:
        """An operator on a list computes for each tensor what it computes for that alone, also in place."""
        found, call = Found(known_faults(accel)), _CALLS[what]
        dtypes = [getattr(torch, each) for each in accel.capabilities.model_dtypes if each != "float64"]
        low = [dtype for dtype in dtypes if dtype.itemsize == 2]
        samples = [(4, dtype, dtype) for dtype in dtypes] + [(1, torch.float32, torch.float32)]
        samples += [(_MANY, dtype, dtype) for dtype in (torch.float32, *low[:1])]
        if call.takes_several:  # as masters and parameters are
            samples += [(4, *pair) for each in low for pair in ((torch.float32, each), (each, torch.float32))]
        for count, dtype, other in samples:
            given = _lists(count, dtype, other, with_empty=not any(each in what for each in _NOT_EMPTY))
            alone = zip(*([[_exact(each)] for each in every] for every in given), strict=True)
            right = [call(getattr(torch, call.forms[0]), one) or one[0] for one in alone]
            for form in call.forms:
                where = f"{what}, {count} tensors in {dtype}, {'in place' if form.endswith('_') else 'as it is'}"
                where += "" if other == dtype else f", with others in {other}"
                kind = dtype if form.endswith("_") else torch.promote_types(dtype, other)
                if found.leaves_out(where):
                    continue
                moved = mapped(
                    lambda each: each.to(accel.device, copy=True) if isinstance(each, Tensor) else each, given
                )
                try:
                    results = call(getattr(torch, form), moved) or moved[0]
                except (NotImplementedError, RuntimeError) as error:
                    if other != dtype:  # torch itself takes some dtypes together only
                        continue
                    if not is_refusal(error):
                        raise
                    refused(f"{where}: {first_line(error)}")
                wrong = _wrong(results, right, kind, max(dtype, other, key=lambda each: torch.finfo(each).eps))
                if wrong:
                    first = [each.flatten()[:3].tolist() for each in (results[wrong[0]], right[wrong[0]][0])]
                    found.note(
                        f"{where}: {len(wrong)} are wrong, number {wrong[0]} begins with {first[0]}, not {first[1]}"
                    )
        assert not found.wrong, "\n".join(found.wrong)
        if found.seen:
            record_property("known_bug", f"lists, {what}: {'; '.join(found.seen)}")


def _wrong(found: list[Tensor], right: list[list[Tensor]], kind: torch.dtype, dtype: torch.dtype) -> list[int]:
    """Return the numbers of the results that are of another kind, or further from the right ones than by rounding."""
    assert len(found) == len(right), f"of {len(right)} tensors it returns {len(found)}"
    exact = [each for (each,) in right]
    forms = zip(found, exact, strict=True)
    wrong = [n for n, (one, other) in enumerate(forms) if (one.dtype, one.shape) != (kind, other.shape)]
    if wrong:
        return wrong
    limit = max(_UNITS * torch.finfo(dtype).eps, _OF_SUMS)
    flat = [torch.cat([each.cpu().double().reshape(-1) for each in every]) for every in (found, exact)]
    off = (~torch.isclose(flat[0], flat[1], limit, 4 * limit, equal_nan=True)).split([each.numel() for each in exact])
    return [number for number, each in enumerate(off) if bool(each.any())]
