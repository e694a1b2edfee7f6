"""Right results of whole numbers and truth values, by other kernels than those that a backend has for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelcore.testing.support.layouts import mapped, placed, tensors

_EXACT = 2.0**53  # the whole numbers below it are fractions of 64 bits, too
_CLOSE = 1e-3  # relative: fractions that are computed of whole numbers, in fp32 or in float64
_BY_DTYPE = ("hash_tensor", "masked.logsumexp")  # whose result for a number depends on its dtype

_BY_NUMPY: dict[str, Callable[..., Any]] = {
    "bincount": np.bincount,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert,
    "bitwise_left_shift": np.left_shift,
    "bitwise_right_shift": np.right_shift,
    "__rand__": np.bitwise_and,
    "__ror__": np.bitwise_or,
    "__rxor__": np.bitwise_xor,
    "gcd": np.gcd,
    "lcm": np.lcm,
    "unravel_index": np.unravel_index,
}
"""Operators without a kernel for fractions."""


def independent(
    name: str, info: Any, dtype: torch.dtype, arguments: Any, own: list[Tensor], *, usual: bool
) -> list[Tensor]:
    """Return an operator's results on the CPU, those in place of which others are right replaced by them.

    The others are computed of contiguous copies in float64, or by numpy.

    Args:
        name, info: the operator and its OpInfo.
        dtype: of whole numbers, or of truth values.
        arguments: of the operator.
        own: its results.
        usual: whether no number is so large that parts of the calculation may overflow.
    """
    others = _others(name, info, dtype, arguments) if usual or name not in _BY_NUMPY else []
    if len(others) != len(own):
        return own
    return [one if _agree(one, other, usual=usual) else _as(one, other) for one, other in zip(own, others, strict=True)]


def _others(name: str, info: Any, dtype: torch.dtype, arguments: Any) -> list[Tensor]:
    """Return the other results; none if there is no other way to compute them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name in _BY_NUMPY:
                given, options = mapped(_to_numpy, arguments)
                return [torch.as_tensor(each) for each in _several(_BY_NUMPY[name](*given, **options))]
        except Exception:  # noqa: BLE001  numpy raises errors of any kind
            return []
        if torch.float64 not in info.supported_dtypes("cpu") or name in _BY_DTYPE:
            return []
        for changed in _widened(arguments, dtype):
            try:
                given, options = placed(changed, torch.device("cpu"), "")
                return tensors(info.op(*given, **options))
            except Exception:  # noqa: BLE001, S112  torch's kernels raise errors of any kind
                continue
    return []


def _to_numpy(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _widened(arguments: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield the arguments with tensors of `dtype` in float64: all, all but each one, only the first and the last.

    Of those that stay, the operator needs whole numbers: indices.
    """
    own = [each for each in tensors(arguments) if each.dtype == dtype and each.layout == torch.strided]
    numbers = range(len(own))
    for kept in ((), *((number,) for number in numbers), tuple(numbers[1:]), tuple(numbers[1:-1])):
        left = {id(own[number]) for number in kept}
        if own and len(left) < len(own):
            yield mapped(partial(_in_float64, dtype, left), arguments)


def _in_float64(dtype: torch.dtype, left: set[int], value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype != dtype or value.layout != torch.strided or id(value) in left:
        return value
    return value.double().contiguous()


def _agree(own: Tensor, other: Tensor, *, usual: bool) -> bool:
    """Return whether two results are the same, or the other one says nothing about the operator's own."""
    if torch.strided not in (own.layout, other.layout) or own.is_complex():
        return True
    if own.dtype.is_floating_point:
        incomparable = not usual or own.dtype != torch.float32 or own.shape != other.shape
        return incomparable or torch.allclose(own.double(), other.double(), _CLOSE, _CLOSE, equal_nan=True)
    if other.dtype.is_floating_point:
        most = 1 if own.dtype == torch.bool else _EXACT
        if not bool(((other == other.round()) & (other.abs() <= most)).all()):
            return True  # rounded, or beyond what can be compared
    elif not usual and own.dtype not in (torch.int64, torch.bool):
        return True
    return own.shape == other.shape and torch.equal(own, _as(own, other))


def _as(own: Tensor, other: Tensor) -> Tensor:
    whole = other if own.dtype.is_floating_point else other.long()  # which wraps as short whole numbers do
    return whole.to(own.dtype)
