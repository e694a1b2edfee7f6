"""The gradients of a model that is divided among ranks: each rank has those of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.runs import Run, Slot
from accelcore.optim.shards import as_shard, shard
from accelcore.training.gradients import Gradients

__all__ = ["ShardedGradients"]


class ShardedGradients(Gradients):
    """Gradients of shards, which backward leaves reduced over all ranks.

    Parameters are DTensors. An optimizer that knows of slots is given this rank's shards of them as plain tensors, in
    the same memory; another one keeps the DTensors in its groups.

    Args:
        slots: what is trained.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self.values = [shard(slot.parameter) for slot in slots]

    def follow(self) -> None:
        for slot, value in zip(self.slots, self.values, strict=True):
            now = shard(slot.parameter)
            if now.data_ptr() != value.data_ptr():
                if (now.dtype, now.device, now.shape) != (value.dtype, value.device, value.shape):
                    raise TrainingError(
                        f"the parameter {slot.name!r} is {now.dtype} on {now.device}, and was {value.dtype} on "
                        f"{value.device}",
                        why="it was changed after its training began",
                        remedy="move and cast the model before the trainer is made, or make a new one",
                    )
                value.data = now

    def gather(self) -> None:
        self.follow()
        self.received = [parameter.grad is not None for parameter in self.parameters]

    def cells(self) -> Sequence[Tensor | None]:
        return [None if parameter.grad is None else shard(parameter.grad) for parameter in self.parameters]

    def pack(self) -> list[Tensor]:
        raise AssertionError("gradients of shards are reduced in backward")

    def unpack(self) -> None:
        raise AssertionError("gradients of shards are reduced in backward")

    def runs(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Run]:
        return [Run([slot], value) for slot, value in zip(self.slots, values, strict=True)]

    def trained(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)

    def promote(self) -> None:
        for value, gradient in zip(self.values, self.cells(), strict=True):
            value.grad = gradient

    def clear(self) -> None:
        super().clear()
        for value in self.values:
            value.grad = None

    def state(self) -> dict[str, Tensor]:
        return {name: shard(gradient) for name, gradient in super().state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for slot, value in zip(self.slots, self.values, strict=True):
                saved = state.get(slot.name)
                own = None if saved is None else torch.empty_like(value).copy_(saved)
                slot.parameter.grad = None if own is None else as_shard(own, slot.parameter)
