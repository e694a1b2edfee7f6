"""A module that all ranks of a job train as one, in a loop without a trainer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelcore.backend import Backend
from accelcore.errors import ConfigurationError, DistributedError, UnsupportedError
from accelcore.launchers import read_launch

__all__ = ["replicate"]


def replicate(backend: Backend, module: nn.Module, **options: Any) -> nn.Module:
    """Move a module to the device, and let ranks average its gradients in backward; see `Backend.replicate`."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError("the module has no parameter to train", remedy="look for requires_grad_(False)")
    collectives, launch = backend.collectives, read_launch()
    if collectives.world_size == 1 and launch is not None and launch.world_size > 1:
        raise DistributedError(
            f"a launcher started {launch.world_size} ranks, and they have not met",
            why="each would train a model of its own",
            remedy="say job = accel.join() before, or replicate inside `with accel.distributed():`",
        )
    if collectives.world_size > 1 and "ddp" not in backend.capabilities.parallel:
        raise UnsupportedError(
            f"modules cannot be replicated on {backend.name}",
            why='it does not declare parallel="ddp"',
            remedy='average gradients with job.all_reduce(parameter.grad, "avg"), or run one process',
        )
    module.to(backend.device)
    if collectives.world_size == 1:
        return module
    device_ids = None if backend.device.index is None else [backend.device.index]
    return DistributedDataParallel(module, device_ids=device_ids, **options)
