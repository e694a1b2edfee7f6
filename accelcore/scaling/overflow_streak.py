"""Count of overflows in a row, and the warning that many updates were skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accelcore.errors import logger

FindBad = Callable[[], "str | None"]
"""Function that returns the name of the first parameter whose gradient is not finite; None if all are finite."""

_PATIENCE = 20
"""Overflows in a row before a warning. The search for the first scale takes at most sixteen halvings of the default."""


class OverflowStreak:
    """Count overflows in a row without waiting for the device.

    If a kernel skips steps, only the device knows. It copies its count to the host, which reads it some steps later.
    """

    def __init__(self) -> None:
        self._length, self._warns_at = 0, _PATIENCE
        self._count: Tensor | None = None
        self._count_on_host: Tensor | None = None

    def count(self, found: Tensor, known: Sequence[bool | None]) -> None:
        """Count a step. `found`: 1.0 if it overflowed, on the device; `known`: the same of each optimizer, or None."""
        if None not in known:
            self._length, self._count_on_host = self._length + 1 if any(known) else 0, None
            return
        if self._count is None or self._count_on_host is None:
            self._count = torch.zeros((), device=found.device)
            on_host = found.device.type == "cpu"
            self._count_on_host = self._count if on_host else torch.zeros((), pin_memory=True)
        torch.addcmul(found, self._count, found, out=self._count)
        if self._count_on_host is not self._count:
            self._count_on_host.copy_(self._count, non_blocking=True)

    def is_due(self) -> bool:
        """Return whether to warn: after every `_PATIENCE` overflows in a row."""
        if self._count_on_host is not None:
            self._length = int(self._count_on_host.numpy())  # `item()` would wait for the device
        if self._length < _PATIENCE:
            self._warns_at = _PATIENCE
        if self._length < self._warns_at:
            return False
        self._warns_at = self._length + _PATIENCE
        return True

    def log(self, scale: float, find_bad: FindBad | None) -> None:
        """Log the count, the loss scale, and, if `find_bad` is given, the first parameter that overflowed."""
        name = None if find_bad is None else find_bad()
        where = f"The first inf or NaN gradient is that of {name}" if name else "No gradient is inf or NaN now"
        if find_bad is None:
            where = "Train without graph=True to see which parameter's gradient is inf or NaN first"
        logger.warning(
            "%d updates in a row were skipped because gradients overflowed. The loss scale is %g. %s. Look for an "
            "inf or NaN in losses and activations, lower the learning rate, or train in bf16",
            *(self._length, scale, where),
        )
