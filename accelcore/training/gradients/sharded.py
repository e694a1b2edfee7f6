"""Gradients of a model that is divided among ranks: each rank has the gradients of its shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.flat.runs import Slot
from accelcore.optim.shards import shard
from accelcore.training.gradients.base import Gradients

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """Gradients of shards, which backward leaves reduced over all ranks.

    Parameters are DTensors. An optimizer of accelcore updates this rank's shards as plain tensors, in the same memory;
    another optimizer has the DTensors in its groups.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self.values, self.flat = [shard(slot.parameter) for slot in slots], [None] * len(slots)

    def refresh(self) -> None:
        for slot, value in zip(self.slots, self.values, strict=True):
            now = shard(slot.parameter)
            if now.data_ptr() != value.data_ptr():
                if (now.dtype, now.device, now.shape) != (value.dtype, value.device, value.shape):
                    raise TrainingError(
                        f"the parameter {slot.name!r} is {now.dtype} on {now.device}, and was {value.dtype} on "
                        f"{value.device}",
                        why="it was changed after the trainer was made",
                        remedy="move and cast the model before the trainer is made, or make a new trainer",
                    )
                value.data = now

    def collect(self) -> None:
        self.refresh()
        self.received = [parameter.grad is not None for parameter in self.parameters]

    def reduce(self, mean: Callable[[Tensor], None]) -> None:
        raise AssertionError("gradients of shards are reduced in backward")

    def of_values(self) -> Sequence[Tensor | None]:
        return [None if parameter.grad is None else shard(parameter.grad) for parameter in self.parameters]

    def grads_to_masters(self) -> None:
        for value, gradient in zip(self.values, self.of_values(), strict=True):
            value.grad = gradient

    def clear(self) -> None:
        super().clear()
        for value in self.values:
            value.grad = None
