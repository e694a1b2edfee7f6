"""Overflows in a row: counted without making the host wait for the device, and said aloud when they are many."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from accelcore.roles.scaled_gradients import FindBad

__all__ = ["PATIENCE", "OverflowStreak"]

logger = logging.getLogger("accelcore")

PATIENCE = 20
"""Overflows in a row that are no search for a scale any more: sixteen halvings bring the usual first one to 1."""


class OverflowStreak:
    """Counts overflows in a row.

    Where the host knows of each, it counts. Elsewhere the device does, and hands its count over as it comes by: the
    host then learns of an overflow a step later, or a few.

    Args:
        device: where overflows are found.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = 0
        self._count: Tensor | None = None
        self._seen: Tensor | None = None
        self._next = PATIENCE

    def add(self, found: Tensor, known: bool | None) -> int:
        """Count a step.

        Args:
            found: 1.0 where gradients overflowed in it, else 0.0.
            known: the same, where the host has read it; None where it has not.

        Returns:
            Overflows in a row up to now, as far as the host knows.
        """
        if known is not None:
            self._known = self._known + 1 if known else 0
            return self._known
        if self._count is None or self._seen is None:
            self._count = torch.zeros((), device=self._device)
            on_host = self._device.type == "cpu"
            self._seen = self._count if on_host else torch.zeros((), pin_memory=True)
        torch.addcmul(found, self._count, found, out=self._count)
        if self._seen is not self._count:
            self._seen.copy_(self._count, non_blocking=True)
        return int(self._seen.numpy())  # not by torch: `item()` would wait

    def tell(self, in_a_row: int, scale: Tensor, find_bad: FindBad) -> None:
        """Warn, now and every `PATIENCE` overflows from now on, with the name of the first bad parameter."""
        if in_a_row < PATIENCE:
            self._next = PATIENCE
        if in_a_row < self._next:
            return
        self._next = in_a_row + PATIENCE
        name = find_bad()
        logger.warning(
            "%d updates in a row were skipped, because gradients overflowed; the loss scale is %g. %s. Look for a loss "
            "or an activation that is inf or NaN, for a learning rate that is too high, or train in bf16",
            in_a_row,
            scale.item(),
            "No gradient is inf or NaN now" if name is None else f"The first that is inf or NaN is that of {name}",
        )
