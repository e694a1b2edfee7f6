"""A job of one process, where nothing is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from accelcore.training.gradients import Gradients
from accelcore.training.strategies.strategy import Strategy

__all__ = ["Alone"]


class Alone(Strategy):
    """What every strategy is in a job of one process."""

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        return model

    def reduce(self, gradients: Gradients, *, exchanged: bool) -> None:
        pass

    def mean(self, value: Tensor) -> Tensor:
        return value

    def sync_buffers(self) -> None:
        pass
