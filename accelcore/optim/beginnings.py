"""The state that an optimizer begins to keep in a step, and drops where that step fails."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Beginnings"]


class Beginnings:
    """What state an optimizer has before a step.

    The state of a parameter is made in its first step, tensor by tensor. Where memory runs out in between, half of it
    is there, and torch's classes take that for all of it in every later step.

    Args:
        optimizer: any of torch's, or of accelcore.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._engine: Optimizer = getattr(optimizer, "engine", optimizer)
        self._known = len(self._engine.state)

    def undo(self) -> None:
        """The step has failed: drop the state that it began and did not use; the next step begins it anew."""
        state = self._engine.state
        for tensor in list(state)[self._known :]:
            if not _is_used(state[tensor]):
                del state[tensor]


def _is_used(entry: object) -> bool:
    """Whether an update was made with this state. One that counts no steps is taken for one that was not."""
    if not isinstance(entry, dict):
        return True  # of an optimizer that keeps its state in a way of its own
    step = entry.get("step")
    return isinstance(step, int | float | Tensor) and bool(torch.as_tensor(step).any())
