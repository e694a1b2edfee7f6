"""Trainers that share parameters take turns: whose gradients lie on the parameters now.

The loss of one trainer may run through what another trains, as a GAN's generator's through the critic. Its backward
pass would add to the other's gradients, where that has a window open; so those are set aside meanwhile. Where no other
window is open this costs a comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import ReferenceType, ref

from torch import Tensor

__all__ = ["Turn"]


class _Thread(threading.local):
    """Each thread trains for itself."""

    holder: ReferenceType[Turn] | None = None


_thread = _Thread()


class Turn:
    """One trainer's right to the `grad` of its parameters.

    Attributes:
        is_open: whether it has gradients of a window, which have to outlast the turns of others.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._aside: list[Tensor | None] | None = None
        self.is_open = False

    def take(self) -> None:
        """Put this trainer's gradients on the parameters, as they were when its last turn ended."""
        holder = None if _thread.holder is None else _thread.holder()
        if holder is self:
            return
        if holder is not None and holder.is_open:
            holder._set_aside()
        if self._aside is not None:
            for parameter, gradient in zip(self._parameters, self._aside, strict=True):
                parameter.grad = gradient
            self._aside = None
        _thread.holder = ref(self)

    def _set_aside(self) -> None:
        self._aside = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
