"""What several strategies send: gradients to be added up, buffers and parameters of one rank to all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelcore.roles.collectives import Collectives
from accelcore.training.gradients import Gradients

__all__ = ["COMM_DTYPES", "add_up", "broadcast", "share_buffers"]

COMM_DTYPES = ("float32", "bfloat16", "float16")
"""What gradients can be exchanged in."""


def add_up(
    collectives: Collectives, gradients: Gradients, *, divisor: int = 1, comm_dtype: torch.dtype | None = None
) -> None:
    """Make gradients, divided by `divisor`, their sum over ranks; what has one on any rank has one then."""

    def mean(packed: Tensor) -> None:
        if divisor != 1:
            packed /= divisor  # before they are summed: the sum of many ranks may be beyond a low precision
        if comm_dtype is None or comm_dtype == packed.dtype:
            collectives.all_reduce(packed)
        else:
            packed.copy_(collectives.all_reduce(packed.to(comm_dtype)))

    gradients.reduce(mean)


def share_buffers(collectives: Collectives, model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0."""
    broadcast(collectives, list(model.buffers()))


@torch.no_grad()
def broadcast(collectives: Collectives, tensors: list[Tensor], *, src: int = 0) -> None:
    """Give all ranks these tensors of rank `src`, of any dtype, at once, as bytes."""
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:
        return
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    received = torch.split(collectives.broadcast(torch.cat(parts), src), [part.numel() for part in parts])
    for tensor, part in zip(tensors, received, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
