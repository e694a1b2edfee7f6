"""Tensors that are divided among ranks: a DTensor is all of one, and knows this rank's shard.

torch.distributed.tensor takes long to import. Who divides a model imports it; before that no tensor is divided.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["as_shard", "is_sharded", "rows_of", "shard", "shard_of"]

_MODULE = "torch.distributed.tensor"


def is_sharded(value: Any) -> TypeIs[DTensor]:
    """Whether a tensor is divided among ranks."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def shard(value: Tensor) -> Tensor:
    """This rank's shard of a tensor: the same memory; the tensor itself where it is not divided."""
    if not is_sharded(value):
        return value
    with torch.no_grad():
        return value.to_local().detach()


def rows_of(value: DTensor) -> tuple[int, int]:
    """The first row of this rank's shard of a tensor, and how many there are.

    Raises:
        ConfigurationError: it is not divided by its rows alone.
    """
    from torch.distributed.tensor import Shard

    mesh = value.device_mesh
    if value.placements != (Shard(0),):
        raise ConfigurationError(
            f"a tensor is divided as {value.placements}, and here the ranks divide rows only",
            remedy='let the trainer divide the model: parallel="fsdp", and no tensor parallelism of your own',
        )
    size = -(-value.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * size, value.shape[0]), shard(value).shape[0]


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, where one of its shape is divided like `like`; nothing is communicated."""
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return shard(value)
    first, count = rows_of(like)
    return value.detach()[first : first + count]


def as_shard(own: Tensor, like: Tensor) -> Tensor:
    """A tensor divided like `like`, of which this rank's shard is `own`; `own` itself where that is not divided."""
    if not is_sharded(like) or own.shape != shard(like).shape:
        return own
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
