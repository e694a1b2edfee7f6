"""Every part of a training, in the order in which they are restored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelcore.roles.runtime import Runtime
from accelcore.roles.scaler import LossScaler
from accelcore.training.data_stream import DataStreams
from accelcore.training.gradients import Gradients
from accelcore.training.parts.extra import ExtraPart
from accelcore.training.parts.model import MastersPart, ModelPart
from accelcore.training.parts.optimizer import OptimizerPart, OwnStatePart
from accelcore.training.parts.part import Part
from accelcore.training.parts.progress import DataStreamsPart, RandomPart, SchedulePart, WindowPart
from accelcore.training.parts.scales import ScalerPart
from accelcore.training.strategies.strategy import Strategy, owns
from accelcore.training.window import Window

__all__ = ["every_part"]


def every_part(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: LossScaler,
    scheduler: LRScheduler | None,
    schedule_by: str,
    gradients: Gradients,
    window: Window,
    streams: DataStreams,
    runtime: Runtime,
    extra: dict[str, Any],
    strategy: Strategy,
) -> Sequence[Part]:
    """What a checkpoint is made of. A new kind of state is one more of these."""
    is_own, divided = partial(owns, strategy), strategy.owners is not None
    of_optimizer = OptimizerPart(model, optimizer, gradients, owns=is_own, divided=divided)
    return [
        ModelPart(model, gradients),
        MastersPart(model, gradients),
        SchedulePart(scheduler, schedule_by),
        of_optimizer,
        OwnStatePart(of_optimizer),
        ScalerPart(scaler),
        WindowPart(model, window, gradients),
        DataStreamsPart(streams, runtime),
        RandomPart(runtime),
        ExtraPart(extra),
    ]
