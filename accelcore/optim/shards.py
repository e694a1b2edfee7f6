"""Shards of tensors that are divided among ranks, which are DTensors.

torch.distributed.tensor takes long to import, so this file does not import it. Without it no tensor is divided.
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

_MODULE = "torch.distributed.tensor"


def is_sharded(value: Any) -> TypeIs[DTensor]:
    """Return whether a tensor is divided among ranks."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def to_local(value: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, in the same memory; the tensor itself if it is not divided."""
    if not is_sharded(value):
        return value
    with torch.no_grad():
        return value.to_local().detach()


def rows_of(value: DTensor) -> tuple[int, int]:
    """Return the first row of this rank's shard, and the number of rows; raise if it is not divided by rows."""
    from torch.distributed.tensor import Shard

    mesh = value.device_mesh
    if value.placements != (Shard(0),):
        raise ConfigurationError(
            f"a tensor is divided as {value.placements}, and only division by rows is supported",
            remedy='let the trainer divide the model by parallel="fsdp", without tensor parallelism',
        )
    size = -(-value.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * size, value.shape[0]), to_local(value).shape[0]


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor that is to be divided as `like` is, without communication."""
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return to_local(value)
    first, count = rows_of(like)
    return value.detach()[first : first + count]


def divided_as(value: Any, like: Tensor) -> Any:
    """Return a whole tensor divided as `like` is, in memory of its own; a value of another shape as it is."""
    if not is_sharded(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return as_shard(shard_of(value, like).clone(), like)


def as_shard(own: Tensor, like: Tensor) -> Tensor:
    """Return the tensor, divided as `like` is, whose shard on this rank is `own`; `own` if `like` is not divided."""
    if not is_sharded(like) or own.shape != to_local(like).shape:
        return own
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
