"""Keep the gradients of trainers apart that share parameters.

The loss of one trainer may run through the model of another, as a GAN's generator loss runs through the critic. Its
backward pass would add to the gradients that the other trainer has accumulated in an open window. Those are set aside
meanwhile. If no other window is open, this costs one comparison.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import ref

from torch import Tensor

__all__ = ["SharedParameters"]


_thread = threading.local()
"""`holder`, in each thread: a weak reference to the parameters that are in use there."""


class SharedParameters:
    """Parameters of one trainer, whose `grad` other trainers may use between its calls.

    Attributes:
        is_open: whether the gradients belong to an open window and must outlast the use by other trainers.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._aside: list[Tensor | None] | None = None
        self.is_open = False

    def acquire(self) -> None:
        """Put this trainer's gradients on the parameters, as it left them."""
        holder: SharedParameters | None = getattr(_thread, "holder", lambda: None)()
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
