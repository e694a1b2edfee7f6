"""Place: the model is moved to the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.training.plan import Plan

__all__ = ["Place"]


class Place:
    """Moves the model, and what state its optimizer already has, to the device."""

    def check(self, plan: Plan) -> None:
        if isinstance(plan.model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ConfigurationError(
                f"the model is already wrapped in {type(plan.model).__name__}",
                remedy='give the bare module and say parallel="ddp"',
            )
        names = {id(parameter) for parameter in plan.model.parameters()}
        strangers = sum(id(parameter) not in names for members in plan.groups() for parameter in members)
        if strangers:
            raise ConfigurationError(
                f"{strangers} of the optimizer's parameters are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make the optimizer from model.parameters(), and make what else is trained a submodule",
            )

    def apply(self, plan: Plan) -> None:
        if plan.strategy.layout == "shards":  # moves part by part: the device need not hold all of it
            return
        plan.model.to(plan.backend.device)
        optimizer = plan.optimizer
        if not isinstance(optimizer, RoutedOptimizer) and _has_state_elsewhere(optimizer, plan.backend.device):
            optimizer.load_state_dict(optimizer.state_dict())


def _has_state_elsewhere(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether it made state before the parameters were moved. Counts of steps may be on the host."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return any(isinstance(value, Tensor) and value.dim() > 0 and value.device != device for value in values)
