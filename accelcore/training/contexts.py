"""The contexts of a training: made once, entered in every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from accelcore.roles.composition import Roles
from accelcore.training.policy import Policy
from accelcore.training.work import work_of

__all__ = ["Contexts"]

logger = logging.getLogger("accelcore")

Context = AbstractContextManager[object]


class Contexts:
    """The precision contexts of a training.

    Attributes:
        make_region: makes the context of a forward pass and its loss.
        region: one of those, to be entered again and again: to make a context costs more than to enter it.
        arithmetic: the context of a backward pass and of an update, likewise.

    Raises:
        UnsupportedError: the backend does not declare the dtype of autocast, its table, or the mode of fp32.
    """

    # Nothing that is kept holds the trainer: such a cycle would hold the device's memory until it is collected.
    def __init__(self, backend: Roles, policy: Policy, fp32: str | None) -> None:
        dtype = self._dtype = getattr(torch, policy.autocast) if policy.autocast else None
        self._precision, self._fp32 = backend.precision, fp32
        self.make_region: Callable[[], Context] = partial(_autocast, backend, dtype, policy.table)
        self.region = self.make_region()
        self.arithmetic: Context = nullcontext()
        if fp32 is not None:
            backend.precision.fp32(fp32)  # refuses here what would be refused in the first step
            self._mode = _Reentrant(partial(backend.precision.fp32, fp32))
            self.arithmetic = self._mode
            self.make_region = partial(_both, self.arithmetic, self.make_region)
            self.region = _Reentrant(self.make_region)

    def judge(self, loss: Tensor) -> None:
        """See, once, by what the forward pass of this loss had to multiply, whether fast fp32 and autocast pay.

        Where `fp32="fast"` is as exact and no faster, it is "ieee" from now on. Autocast stays what was asked for.
        """
        work = work_of(loss) if self._fp32 == "fast" or self._dtype is not None else None
        if work is None:
            return
        if self._fp32 == "fast" and not self._precision.fast_pays(work):
            self._mode.make = partial(self._precision.fp32, "ieee")
            logger.warning(
                'fp32="fast" is "ieee" here: %d products, of %.1g operations together, are too small to gain by it',
                work.products, work.operations,
            )  # fmt: skip
        if self._dtype is not None and not self._precision.autocast_pays(self._dtype, work):
            logger.warning(
                "autocast to %s makes this training slower than fp32: its %d products take %.1g operations, which gain "
                'less than their %d casts cost; precision="fp32" does without',
                str(self._dtype).removeprefix("torch."), work.products, work.operations, work.casts,
            )  # fmt: skip


class _Reentrant:
    """A context that is made each time it is entered, where the one made could be entered only once."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self.make = make
        self._entered: list[Context] = []

    def __enter__(self) -> object:
        self._entered.append(self.make())
        return self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def _autocast(backend: Roles, dtype: torch.dtype | None, table: str) -> Context:
    return nullcontext() if dtype is None else backend.precision.autocast(dtype, table=table)


@contextmanager
def _both(outer: Context, make_inner: Callable[[], Context]) -> Iterator[None]:
    with outer, make_inner():
        yield
