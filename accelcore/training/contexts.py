"""Precision contexts of a training run, created once and entered in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from accelcore.precision.policy import Policy

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Contexts"]

Context = AbstractContextManager[object]


class Contexts:
    """Precision contexts of a training run.

    Attributes:
        make_region: returns a new context for a forward pass and its loss.
        region: such a context that can be entered repeatedly, which is cheaper than a new one.
        arithmetic: the reusable context of a backward pass and of an update.

    Raises:
        UnsupportedError: the backend does not declare the dtype of autocast, its table, or the mode of fp32.
    """

    # No attribute refers to the trainer: a reference cycle would keep the device's memory until garbage collection.
    def __init__(self, backend: Backend, policy: Policy, fp32: str | None) -> None:
        dtype = getattr(torch, policy.autocast) if policy.autocast else None
        self.make_region: Callable[[], Context] = (
            nullcontext if dtype is None else partial(backend.precision.autocast, dtype, table=policy.table)
        )
        self.region = self.make_region()
        self.arithmetic: Context = nullcontext()
        if fp32 is not None:
            backend.precision.fp32(fp32)  # raises here what the first step would raise
            self.arithmetic = _Reentrant(partial(backend.precision.fp32, fp32))
            self.make_region = partial(_both, self.arithmetic, self.make_region)
            self.region = _Reentrant(self.make_region)


class _Reentrant:
    """Reusable context that creates a one-time context on each entry."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make
        self._entered: list[Context] = []

    def __enter__(self) -> object:
        self._entered.append(self._make())
        return self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


@contextmanager
def _both(outer: Context, make_inner: Callable[[], Context]) -> Iterator[None]:
    with outer, make_inner():
        yield
