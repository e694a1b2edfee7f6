"""combine_ddp: gradients are laid into one piece of memory a dtype, and exchanged once a window, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.backend import Backend
from accelcore.errors import ConfigurationError
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.strategies.exchanging import COMM_DTYPES, add_up, broadcast, share_buffers
from accelcore.training.strategies.strategy import Strategy

__all__ = ["CombineDDP"]


class CombineDDP(Strategy):
    """One all_reduce for each dtype after the last backward pass of a window (as `combine_ddp` of Ascend's apex).

    There are no buckets, and no hooks in backward; computation and communication do not overlap. A parameter that a
    rank did not use costs nothing: which parameters received a gradient travels with the gradients.
    """

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self.divisor = backend.collectives.world_size
        name = options["comm_dtype"]
        if name is not None and name not in COMM_DTYPES:
            raise ConfigurationError(
                f"comm_dtype={name!r} is no dtype to add gradients in", available=", ".join(COMM_DTYPES)
            )
        self._comm_dtype: torch.dtype | None = None if name is None else getattr(torch, name)

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        self._model = model
        broadcast(self.collectives, [*model.parameters(), *model.buffers()])
        return model

    def reduce(self, gradients: Gradients, *, exchanged: bool) -> None:
        add_up(self.collectives, gradients, comm_dtype=self._comm_dtype)

    def mean(self, value: Tensor) -> Tensor:
        return self.collectives.all_reduce(value, "avg")

    def sync_buffers(self) -> None:
        share_buffers(self.collectives, self._model)
