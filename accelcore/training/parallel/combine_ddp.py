"""combine_ddp: one all_reduce for each dtype at the end of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import Strategy, all_reduce_gradients, broadcast_tensors, comm_dtype

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["CombineDDP"]


class CombineDDP(Strategy):
    """One all_reduce for each dtype after the last backward pass of a window (as `combine_ddp` of Ascend's apex).

    It needs neither buckets nor hooks in backward, and does not overlap computation and communication. A parameter that
    a rank did not use costs nothing: a flag for each parameter travels with the gradients.
    """

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self.divisor = backend.collectives.world_size
        self._comm_dtype = comm_dtype(options)

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        broadcast_tensors(self.collectives, [*model.parameters(), *model.buffers()])
        return model

    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        all_reduce_gradients(self.collectives, gradients, dtype=self._comm_dtype)
