"""The right result of an operator on a sample, and how far a device's may be from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

_EXACT = 8  # times the rounding errors of inputs and result
_EXACT_IN_LOW = 2  # times those of bf16 and fp16, in which kernels round their results, and hardly anything before
_OF_SCALE = 4  # rounding errors of the largest number: a kernel may add up thousands of terms one by one
_SYSTEMATIC = 2  # rounding errors of constants, such as the reciprocal of a mean's count


class _Limits(NamedTuple):
    right: Tensor
    allowed: Tensor
    compared: Tensor  # what has to be within these limits, and
    fixed: Tensor | None  # what has to be that infinity or NaN


@dataclass
class Expected:
    """One tensor of the right result, computed in float64.

    Attributes:
        part: which one, in words.
        right: the tensor.
        dtype: in which the device computes it.
        factor: by which it may be further away than usual.
        overflowed: returns what the tensor is if numbers on the way to it become infinite that are too large for the
            dtype; None if there are none.
        strict: whether an infinity or NaN has to be that one. Of gradients at infinities only the finite ones are.
        rounded: functions that return what it was when rounding errors had moved each number; several, by chance. They
            take time, so the first is called if the tensor differs by more than one rounding error, and the next
            before a difference is reported, because a few may all have moved a number the harmless way. If the first
            returns none, nothing can be compared.
    """

    part: str
    right: Tensor
    dtype: torch.dtype
    factor: int
    overflowed: Callable[[], Tensor | None]
    strict: bool
    rounded: Sequence[Callable[[], list[Tensor]]]

    def cast(self, dtype: torch.dtype) -> Expected:
        """Return it as a tensor of `dtype` holds it."""

        def held(of: Callable[[], list[Tensor]]) -> list[Tensor]:
            return [each.to(dtype) for each in of()]

        rounded = [partial(held, each) for each in self.rounded]
        return replace(self, right=self.right.to(dtype), strict=True, rounded=rounded)

    def differs_in_form(self, found: Tensor) -> str:
        """Return what is wrong with a result's shape or dtype, in words; empty if nothing is."""
        right = self.right
        if found.shape != right.shape:
            return f"is of shape {tuple(found.shape)} instead of {tuple(right.shape)}"
        if self.dtype.is_floating_point and right.dtype == torch.float64 and not found.dtype.is_floating_point:
            return f"is {found.dtype} instead of {self.dtype}"
        fractions = right.dtype.is_floating_point or right.dtype.is_complex
        exact = not fractions or (not self.dtype.is_floating_point and right.dtype == torch.float32)
        if exact and found.dtype != right.dtype:
            return f"is {found.dtype} instead of {right.dtype}"
        return ""

    def differs(self, found: Tensor) -> str:
        """Return what is wrong with the values of a result of this form, in words; empty if nothing is."""
        if self._is_close(found):
            return ""
        difference, others = self._difference(found, []), list[Tensor]()
        for rounded in self.rounded if difference else ():
            others += rounded()
            if not others or not (difference := self._difference(found, others)):
                return ""
        return difference

    def _is_close(self, found: Tensor) -> bool:
        """Return whether a result is within the narrowest limits, which most are: `_difference` takes longer."""
        right, found = self.right, found.detach().cpu()
        if right.layout != torch.strided or found.layout != torch.strided or right.is_complex():
            return False
        if not right.dtype.is_floating_point:
            return torch.equal(found, right)
        if self._narrowest is None:
            return False
        exact, allowed = self._narrowest
        return bool((found.double() - exact).abs_().le(allowed).all())

    @cached_property
    def _narrowest(self) -> tuple[Tensor, Tensor] | None:
        """The right numbers and the narrowest limits around them; None if some are too large. All forms need them."""
        exact = self.right.double()
        size, limits = exact.abs(), torch.finfo(self._computed_in(self.right))
        scale = float(size.max()) if size.numel() else 0.0
        if not scale < limits.max / 4:
            return None
        return exact, size.mul_(self._exact * limits.eps).add_(2 * limits.eps * scale)

    @property
    def _exact(self) -> int:
        return _EXACT_IN_LOW if self.dtype in (torch.bfloat16, torch.float16) else _EXACT

    def _computed_in(self, right: Tensor) -> torch.dtype:
        if self.dtype.is_floating_point:
            return self.dtype
        return torch.float32 if right.dtype == torch.float64 else right.dtype  # not all devices have float64

    def _difference(self, found: Tensor, others: list[Tensor]) -> str:
        limits = self._limits(others)
        if limits is None:
            return ""
        right, allowed, compared, fixed = limits
        found = found.detach().cpu()
        if self.right.is_complex():
            found = torch.view_as_real(found.to(self.right.dtype).resolve_conj())
        if right.dtype.is_floating_point:
            found = found.double()
            wrong = ~((found - right).abs() <= allowed) & compared
            if fixed is not None:
                wrong |= fixed & ~((found == right) | (found.isnan() & right.isnan()))
            beyond = ~found.isfinite()
            if self.part.startswith("the gradient"):  # it may be a number divided by one that is too large
                beyond |= found == 0
            if others and bool((wrong & beyond).any()) and (overflowed := self.overflowed()) is not None:
                overflowed = torch.view_as_real(overflowed.resolve_conj()) if overflowed.is_complex() else overflowed
                wrong &= ~beyond | ((overflowed.double() - right).abs() <= allowed)  # what overflows may vanish, too
        else:
            wrong = (found != right) & compared
        if not bool(wrong.any()):
            return self._off_by_a_factor(found, right, others, compared)
        first = tuple(wrong.nonzero()[0].tolist())
        return (
            f"is wrong in {int(wrong.sum())} of {wrong.numel()} elements: {found[first].item():.6g} instead of "
            f"{right[first].item():.6g} at {list(first)}"
        )

    def _off_by_a_factor(self, found: Tensor, right: Tensor, others: list[Tensor], compared: Tensor) -> str:
        """Return in words that a result in low precision is too large or too small as a whole; empty if it is not.

        Rounding errors of many elements cancel out, so that a smaller error shows than in each element.
        """
        in_low = self.dtype in (torch.bfloat16, torch.float16) and right.dtype.is_floating_point
        if not in_low or self.factor > 1:
            return ""
        compared = compared & found.isfinite()
        right, limits = right[compared], torch.finfo(self.dtype)
        power, fourth = (float(right.pow(exponent).sum()) for exponent in (2, 4))
        if not fourth > 0:  # or so small that it vanishes in float64
            return ""

        def excess(tensor: Tensor) -> float:
            values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            return float((values.double()[compared] * right).nan_to_num(0.0).sum()) / power - 1

        count = power**2 / fourth  # of elements that matter
        allowed = (_SYSTEMATIC + 3 / count**0.5) * limits.eps + limits.tiny * (len(right) / power) ** 0.5
        allowed += max((abs(excess(each)) for each in others), default=0.0)
        off = excess(found)
        return f"is {1 + off:.3f} times what it should be" if abs(off) > allowed else ""

    def _limits(self, others: list[Tensor]) -> _Limits | None:
        """Return what is compared; None if nothing can be."""
        right = self.right
        if right.layout != torch.strided or any(each.shape != right.shape for each in others) or not right.numel():
            return None
        if right.is_complex():
            right, *others = (torch.view_as_real(each.resolve_conj()) for each in (right, *others))
        if not right.dtype.is_floating_point:
            same = [each == right for each in others] or [torch.ones_like(right, dtype=torch.bool)]
            return _Limits(right, right, torch.stack(same).all(0), None)
        limits = torch.finfo(self._computed_in(right))
        right, others = right.double(), [each.double() for each in others]
        size, finite = right.abs(), right.isfinite()
        spread = torch.stack([(each - right).abs() for each in others]).amax(0) if others else torch.zeros_like(size)
        compared = finite & spread.isfinite() & (size < limits.max / 4)
        scale = float(size[compared].max()) if bool(compared.any()) else 0.0
        if bool(compared.any()):  # by chance they may have moved an element hardly
            usual = spread[compared]
            spread = usual.amax() if len(others) == 1 else spread.clamp(min=float(usual.median()))
        rounded = self._exact * (spread + limits.eps * size)
        of_scale = _OF_SCALE if self._exact == _EXACT else 2
        allowed = self.factor * (rounded + of_scale * limits.eps * scale) + _EXACT * limits.tiny
        fixed = None
        if self.strict and not bool(finite.all()):
            fixed = ~finite
            for each in others:
                fixed &= (each == right) | (each.isnan() & right.isnan())
        return _Limits(right, allowed, compared, fixed)
