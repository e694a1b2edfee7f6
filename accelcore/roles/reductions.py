"""What collectives reduce, and how: which reductions there are, of which numbers, and in which memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.errors import ConfigurationError

__all__ = ["OPS", "check_reduction", "check_source", "dense", "divisors", "store"]

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
"""torch's reduction for each; an average is a sum that is divided here, because gloo has none."""


def check_reduction(tensor: Tensor, op: str) -> None:
    """Raise ConfigurationError for a reduction that there is not, or not of such numbers."""
    if op not in OPS:
        raise ConfigurationError(f"there is no reduction {op!r}", available=", ".join(OPS))
    if op == "avg" and not tensor.is_floating_point():
        raise ConfigurationError(f"the average of {tensor.dtype} tensors is not defined", remedy="use 'sum'")


def divisors(dtype: torch.dtype, world_size: int) -> tuple[int, int]:
    """By what an average is divided before values are added, and after."""
    narrow = torch.finfo(dtype).smallest_normal > torch.finfo(torch.float32).smallest_normal
    return (world_size, 1) if narrow else (1, world_size)


def check_source(src: int, world_size: int) -> None:
    """Raise ConfigurationError where no rank has this number."""
    if not 0 <= src < world_size:
        raise ConfigurationError(f"there is no rank {src}", available=f"ranks 0 to {world_size - 1}")


def dense(tensor: Tensor) -> Tensor:
    """What is communicated in place of `tensor`: gloo takes a strided view for the dense memory under it."""
    return tensor.detach().contiguous()


def store(tensor: Tensor, sent: Tensor) -> None:
    """Have in `tensor` what was communicated in its place."""
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
