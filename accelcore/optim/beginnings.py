"""The state that an optimizer begins to keep in a step, and drops where that step fails."""

from __future__ import annotations

from typing import Any

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


def _is_used(entry: dict[str, Any]) -> bool:
    """Whether an update was made with this state. One that counts no steps is taken for one that was not."""
    return bool(float(entry.get("step", 0)) > 0)
