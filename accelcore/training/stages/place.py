"""Place and SyncStatistics: move the model to the device, and let BatchNorm use the statistics of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.torch_internals import AnyBatchNorm, shares_tensor_objects
from accelcore.training.plan import Plan

__all__ = ["Place", "SyncStatistics"]


class Place:
    """Move the model, and state that the optimizer already has, to the device."""

    def check(self, plan: Plan) -> None:
        if isinstance(plan.model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ConfigurationError(
                f"the model is already wrapped in {type(plan.model).__name__}",
                remedy='pass the bare module, and parallel="ddp"',
            )
        names = {id(parameter) for parameter in plan.model.parameters()}
        strangers = sum(id(parameter) not in names for members in plan.groups() for parameter in members)
        if strangers:
            raise ConfigurationError(
                f"{strangers} of the optimizer's parameters are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make the optimizer from model.parameters(); make other trained modules submodules of the model",
            )
        held = {id(member) for members in plan.groups() for member in members}
        trainable = ((name, one) for name, one in plan.model.named_parameters() if one.requires_grad)
        if missed := [name for name, one in trainable if id(one) not in held]:
            raise ConfigurationError(
                f"the optimizer does not have {len(missed)} of the model's trainable parameters, such as {missed[0]!r}",
                why="they would never be trained",
                remedy="make the optimizer from model.parameters(), or freeze them by requires_grad_(False)",
            )

    def apply(self, plan: Plan) -> None:
        if plan.strategy.layout == "shards":  # moves group by group: the device need not hold all of it
            return
        with _same_parameters(plan.backend.device):
            plan.model.to(plan.backend.device)
        optimizer, device = plan.optimizer, plan.backend.device
        if not isinstance(optimizer, RoutedOptimizer):
            state = [value for entry in optimizer.state.values() for value in entry.values()]
            # Step counts may be on the host.
            if any(isinstance(value, Tensor) and value.dim() > 0 and value.device != device for value in state):
                optimizer.load_state_dict(optimizer.state_dict())


@contextmanager
def _same_parameters(device: torch.device) -> Iterator[None]:
    """Let `Module.to` keep the parameters, which the optimizer has.

    torch would replace them if the device's tensors cannot share an object with the host's, as outside of torch.
    """
    if shares_tensor_objects(device):
        yield
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


class SyncStatistics:
    """Replace each BatchNorm by torch's SyncBatchNorm, with the same parameters, if `sync_batchnorm=True`."""

    def check(self, plan: Plan) -> None:
        wanted, backend = plan.options["sync_batchnorm"], plan.backend
        if not isinstance(wanted, bool):
            raise ConfigurationError(f"sync_batchnorm={wanted!r} is not True or False")
        if not wanted or backend.collectives.world_size == 1:
            return
        if not backend.capabilities.sync_batchnorm:
            raise UnsupportedError(
                f"{backend.name} does not support sync_batchnorm",
                remedy="leave sync_batchnorm out, or use LayerNorm or GroupNorm",
            )
        if isinstance(plan.model, AnyBatchNorm) and not isinstance(plan.model, nn.SyncBatchNorm):
            raise ConfigurationError(
                "the model itself is a BatchNorm, which cannot be replaced", remedy="make it a submodule of a model"
            )

    def apply(self, plan: Plan) -> None:
        if plan.options["sync_batchnorm"] and plan.backend.collectives.world_size > 1:
            nn.SyncBatchNorm.convert_sync_batchnorm(plan.model)  # type: ignore[no-untyped-call]
