"""Rounding errors: how far the results of a calculation may be from the exact ones, by trying."""

from __future__ import annotations

import math
import random
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore.testing.support.layouts import mapped

_EPS = 2.0**-23  # of fp32, in which a kernel subtracts the logarithm of a sum from numbers around 1
_NOISE = 2**21  # numbers, drawn once: to draw them for each result would take longer than all else


class Rounding(TorchDispatchMode):
    """Moves the result of each operator in float64 by half a unit of `dtype` or less, up or down by chance.

    The spread of several such runs is the effect of rounding errors, also where a calculation amplifies them.

    Args:
        dtype: of the device's calculation.
        seed: of the chance.
        watch: whether to look for numbers that are too large for `dtype`, which takes time, and to make them infinite.

    Attributes:
        overflows: whether it has found one.
        draws: whether an operator drew random numbers.
    """

    def __init__(self, dtype: torch.dtype, seed: int, *, watch: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.overflows = self.draws = False
        self._eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        self._largest = torch.finfo(dtype).max / 4 if watch and dtype.is_floating_point else 0.0
        self._random = random.Random(seed)  # noqa: S311  # noise

    def inputs(self, arguments: Any) -> Any:
        """Return nested arguments with their numbers moved."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return self._moved(value.detach()).requires_grad_(value.requires_grad)

        return mapped(move, arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = kwargs.get("generator") is not None  # the weights of the results are drawn so
        may_draw = torch.Tag.nondeterministic_seeded in func.tags and not own
        state = torch.default_generator.get_state() if may_draw else None
        result = func(*args, **kwargs)
        if state is not None:  # attention without dropout, for example, draws nothing
            self.draws |= not torch.equal(state, torch.default_generator.get_state())
        if _is_view_or_written(func):
            return result
        if isinstance(result, Tensor):
            moved = self._moved(result)
            if func is torch.ops.aten._log_softmax.default and self._eps:
                moved = moved + (self._moved(torch.ones_like(result)) - 1) * (_EPS / self._eps)
            return moved
        if isinstance(result, tuple | list):
            return type(result)(self._moved(each) if isinstance(each, Tensor) else each for each in result)
        return result

    def _moved(self, value: Tensor) -> Tensor:
        if value.dtype == torch.complex128 and value.layout == torch.strided:
            return torch.view_as_complex(self._moved(torch.view_as_real(value.resolve_conj())))
        if value.dtype != torch.float64 or value.layout != torch.strided or not value.numel():
            return value
        if value._is_zerotensor():  # torch's zeros without memory, which it adds in backward
            return value
        if self._largest and not float(torch.linalg.vector_norm(value, math.inf)) <= self._largest:
            beyond = value.isfinite() & (value.abs() > self._largest)
            self.overflows |= bool(beyond.any())
            value = value.where(~beyond, value * math.inf)
        count = value.numel()
        if count > _NOISE // 2:
            noise = _noise_of(count, self._random.getrandbits(32), self._eps)
        else:
            start = self._random.randrange(_NOISE - count)  # another place, so that no two results are moved alike
            noise = _noise_of(_NOISE, 0, self._eps)[start : start + count]
        return value * noise.view(value.shape)


@lru_cache(maxsize=4)
def _noise_of(count: int, seed: int, eps: float) -> Tensor:
    """Return factors around 1: infinities times them stay what they are."""
    drawn = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return drawn.mul_(2 * eps).add_(1 - eps)


@cache
def _is_view_or_written(func: Any) -> bool:
    return any(returned.alias_info is not None for returned in func._schema.returns)
