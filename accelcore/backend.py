"""A backend: what one device can do, and the way from there to a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelcore.roles.composition import Roles

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Unpack

    from accelcore.training.options import TrainerOptions
    from accelcore.training.trainer import Trainer

__all__ = ["Backend"]


@dataclass(frozen=True)
class Backend(Roles):
    """One device, ready to use. Made by `accelcore.select()`; its fields are those of `Roles`."""

    def trainer(self, model: nn.Module, optimizer: Optimizer, **options: Unpack[TrainerOptions]) -> Trainer:
        """Prepare a model and its optimizer for training here; `TrainerOptions` tells the options."""
        from accelcore.training.trainer import Trainer

        return Trainer(self, model, optimizer, **options)
