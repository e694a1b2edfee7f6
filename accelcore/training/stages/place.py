"""Place: the model is moved to the device."""

from __future__ import annotations

from torch import nn

from accelcore.errors import ConfigurationError
from accelcore.optim.optimizer import Optimizer
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
        groups = plan.optimizer.param_groups
        strangers = sum(id(parameter) not in names for group in groups for parameter in group["params"])
        if strangers:
            raise ConfigurationError(
                f"{strangers} of the optimizer's parameters are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make the optimizer from model.parameters(), and make what else is trained a submodule",
            )

    def apply(self, plan: Plan) -> None:
        plan.model.to(plan.backend.device)
        optimizer = plan.optimizer
        if optimizer.state and not isinstance(optimizer, Optimizer):  # made with it, before the parameters were moved
            optimizer.load_state_dict(optimizer.state_dict())
