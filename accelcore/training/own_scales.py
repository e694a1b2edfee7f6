"""Losses that have a loss scale of their own, in one training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from accelcore.errors import UnsupportedError
from accelcore.roles.composition import Roles
from accelcore.roles.scaler import LossScaler
from accelcore.training.strategies.strategy import Strategy

__all__ = ["OwnScales"]


class OwnScales:
    """The loss scales of single losses, by name; each is made as the trainer's own when it is first asked for.

    Gradients of such a loss are divided by its scale, and multiplied by the trainer's, before they are added to those
    of other losses. Where they overflow the update is skipped, and only this scale falls.

    Args:
        backend: where to train.
        make: makes a scaler.

    Attributes:
        scalers: those that were asked for; the same dict for ever.
    """

    def __init__(self, backend: Roles, make: Callable[[], LossScaler]) -> None:
        self._backend, self.make = backend, make
        self.scalers: dict[str, LossScaler] = {}

    def __getitem__(self, name: str) -> LossScaler:
        if name not in self.scalers:
            self.scalers[name] = self.make()
        return self.scalers[name]

    def put(self, scalers: Mapping[str, LossScaler]) -> None:
        """Have these from now on."""
        self.scalers.clear()
        self.scalers.update(scalers)

    def check(self, strategy: Strategy) -> None:
        """Raise UnsupportedError where a loss cannot have a scale of its own."""
        if strategy.exchanges_in_backward:
            raise UnsupportedError(
                "a loss with a scale of its own, and a strategy that exchanges gradients in backward",
                why="its gradients would be exchanged while they are still multiplied by it",
                remedy='say parallel="combine_ddp"',
            )
        if self._backend.capabilities.overflow_flag:
            raise UnsupportedError(
                f"a loss with a scale of its own on {self._backend.name}",
                why="the device reports an overflow by a flag, which does not say in which loss",
                remedy="add the losses up and scale them together",
            )

    def transfer(self, name: str, gradients: Sequence[Tensor], to: LossScaler, strategy: Strategy) -> None:
        """Bring gradients of the loss of that name to the trainer's scale, in place."""
        self[name].transfer(gradients, to, lambda found: (strategy.mean(found) > 0).float())

    def update(self) -> Tensor | None:
        """End a window: 1.0 where gradients overflowed by one of these scales; None where none of them was used."""
        used = [(scaler, found) for scaler in self.scalers.values() if (found := scaler.overflowed) is not None]
        for scaler, _ in used:
            scaler.update()
        return torch.stack([found for _, found in used]).amax() if used else None

    def abandon(self) -> None:
        """Forget a step that was begun and failed."""
        for scaler in self.scalers.values():
            scaler.abandon()
