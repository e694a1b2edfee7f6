"""Tensors that are divided among ranks: a DTensor is all of one, and knows this rank's shard.

torch.distributed.tensor takes long to import. Who divides a model imports it; before that no tensor is divided.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = ["as_shard", "is_sharded", "shard", "shard_of"]

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


def shard_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, where one of its shape is divided like `like`; nothing is communicated."""
    if is_sharded(value) or not is_sharded(like) or value.shape != like.shape:
        return shard(value)
    from torch.distributed.tensor import distribute_tensor

    whole = value.detach().to(shard(like).device)
    divided = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return shard(divided)


def as_shard(own: Tensor, like: Tensor) -> Tensor:
    """A tensor divided like `like`, of which this rank's shard is `own`; `own` itself where that is not divided."""
    if not is_sharded(like) or own.shape != shard(like).shape:
        return own
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
