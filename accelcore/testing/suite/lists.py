"""Conformance of operators on lists of tensors (`torch._foreach_*`), by which optimizers, clipping and scalers work."""

from __future__ import annotations

import math
from collections.abc import Callable
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

_BY: dict[str, Callable[..., Any]] = {
    "add": lambda f, a, b, c, n: f(a, b, alpha=0.5),
    "add of a number": lambda f, a, b, c, n: f(a, 2.5),
    "add of numbers": lambda f, a, b, c, n: f(a, n),
    "sub": lambda f, a, b, c, n: f(a, b, alpha=0.5),
    "mul": lambda f, a, b, c, n: f(a, b),
    "mul of a number": lambda f, a, b, c, n: f(a, 2.5),
    "mul of numbers": lambda f, a, b, c, n: f(a, n),
    "mul of a tensor": lambda f, a, b, c, n: f(a, torch.full((), 2.5, device=a[0].device, dtype=a[0].dtype)),
    "div": lambda f, a, b, c, n: f(a, b),
    "div of numbers": lambda f, a, b, c, n: f(a, n),
    "lerp": lambda f, a, b, c, n: f(a, b, c),
    "lerp of a number": lambda f, a, b, c, n: f(a, b, 0.25),
    "addcmul": lambda f, a, b, c, n: f(a, b, c, value=0.5),
    "addcmul of numbers": lambda f, a, b, c, n: f(a, b, c, n),
    "addcdiv": lambda f, a, b, c, n: f(a, b, c, value=0.5),
    "addcdiv of numbers": lambda f, a, b, c, n: f(a, b, c, n),
    "maximum": lambda f, a, b, c, n: f(a, b),
    "minimum": lambda f, a, b, c, n: f(a, b),
    "clamp_min of a number": lambda f, a, b, c, n: f(a, 0.5),
    "pow of a number": lambda f, a, b, c, n: f(a, 2.0),
    **dict.fromkeys(("abs", "neg", "sqrt", "reciprocal", "exp"), lambda f, a, b, c, n: f(a)),
    "copy": lambda f, a, b, c, n: f(a, b),
    "zero": lambda f, a, b, c, n: f(a),
    "norm": lambda f, a, b, c, n: f(a),
    "norm of order 1": lambda f, a, b, c, n: f(a, 1),
    "norm of order inf": lambda f, a, b, c, n: f(a, math.inf),
}
"""How each is called with three lists of tensors and one of numbers."""


def _lists(count: int, dtype: torch.dtype, *, with_empty: bool) -> list[list[Any]]:
    """Return three lists of tensors of many sizes, some in other strides than those of the other lists; and numbers."""
    generator = torch.Generator().manual_seed(count)
    sizes = [max((number - 3) % 100, 0 if with_empty else 1) for number in range(count)]
    shapes: list[tuple[int, ...]] = [((), (size,), (2, 5), (size,))[number % 4] for number, size in enumerate(sizes)]
    if count == _MANY:
        shapes[-2] = (_LARGE,)
    a, b, c = ([torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(3))
    for first, every in ((2, a), (6, b)):
        every[first::8] = [each.t().contiguous().t() for each in every[first::8]]
    if count > 1:
        a[1][0], a[-2][-1] = math.nan, -math.inf
    c = [each.abs() + 0.5 for each in c]
    return [a, [each.abs() + 1 for each in b], c, [1.0 + number % 5 for number in range(count)]]


class ListTests:
    """The part of `TestOperators` that is about lists."""

    @pytest.mark.parametrize("what", _BY)
    def test_lists(self, accel: Backend, what: str, record_property: Any) -> None:
        """An operator on a list computes for each tensor what it computes for that alone, also in place."""
        found, name = Found(known_faults(accel)), f"_foreach_{what.partition(' ')[0]}"
        forms = [form for form in (name, f"{name}_") if hasattr(torch, form)]
        dtypes = [getattr(torch, each) for each in accel.capabilities.model_dtypes if each != "float64"]
        samples = [(4, dtype) for dtype in dtypes] + [(count, torch.float32) for count in (1, _MANY)]
        for count, dtype in samples:
            given = _lists(count, dtype, with_empty="inf" not in what)
            exact = mapped(lambda each: each.double() if isinstance(each, Tensor) else each, given)
            alone = zip(*([[each] for each in every] for every in exact), strict=True)
            right = [_BY[what](getattr(torch, forms[0]), *one) or one[0] for one in alone]
            for form in forms:
                where = f"{what}, {count} tensors in {dtype}, {'in place' if form.endswith('_') else 'as it is'}"
                if found.leaves_out(where):
                    continue
                moved = mapped(
                    lambda each: each.to(accel.device, copy=True) if isinstance(each, Tensor) else each, given
                )
                try:
                    results = _BY[what](getattr(torch, form), *moved) or moved[0]
                except (NotImplementedError, RuntimeError) as error:
                    if not is_refusal(error):
                        raise
                    refused(f"{where}: {first_line(error)}")
                wrong = [
                    n
                    for n, (one, (other,)) in enumerate(zip(results, right, strict=True))
                    if not _close(one, other, dtype)
                ]
                if wrong:
                    first = [each.flatten()[:3].tolist() for each in (results[wrong[0]], right[wrong[0]][0])]
                    found.note(
                        f"{where}: {len(wrong)} are wrong, number {wrong[0]} begins with {first[0]}, not {first[1]}"
                    )
        assert not found.wrong, "\n".join(found.wrong)
        if found.seen:
            record_property("known_bug", f"lists, {what}: {'; '.join(found.seen)}")


def _close(found: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    if (found.dtype, found.shape) != (dtype, right.shape):
        return False
    limit = max(_UNITS * torch.finfo(dtype).eps, _OF_SUMS)
    return torch.allclose(found.cpu().double(), right, limit, 4 * limit, equal_nan=True)
