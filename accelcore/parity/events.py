"""Events of a step: what was seen where, and a sample of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import torch
from torch import Tensor

from accelcore.optim.shards import to_local

__all__ = ["PHASE_OF", "Event", "Seen", "Step", "sample", "shorter"]

PHASE_OF = {
    "random": "random",
    "weight": "weights",
    "batch": "batch",
    "input": "forward",
    "output": "forward",
    "loss": "forward",
    "buffer": "forward",
    "operator": "forward",
    "grad": "backward",
    "gradient": "backward",
    "operator of backward": "backward",
    "reduced": "collective",
    "norm": "collective",
    "old state": "update",
    "state": "update",
    "parameter": "update",
}
"""The part of a step to which each kind of event belongs."""

_SCATTER = 0.6180339887498949  # of the golden ratio: its multiples modulo 1 are spread evenly


@dataclass(frozen=True)
class Event:
    """One thing that was seen in a step.

    Attributes:
        kind: a key of `PHASE_OF`.
        module: the module's name as in `model.named_modules()`.
        item: the number of an input or output, the parameter's or buffer's name, the optimizer state's name with the
            parameter's, or the operator's name.
        number: how often the same was seen before in this step.
    """

    kind: str
    module: str
    item: str
    number: int = 0


@dataclass
class Seen:
    """An event with the sample that was taken.

    Attributes:
        source: the module that made this tensor; empty if no module did.
        values: the sample, on the host; up to 64 bits a number.
    """

    event: Event
    dtype: str
    shape: tuple[int, ...]
    source: str
    values: Tensor


@dataclass
class Step:
    """The events of one step, in the order in which they came."""

    number: int
    seen: list[Seen]


def sample(tensor: Tensor, count: int) -> Tensor:
    """Return up to `count` elements of a tensor, spread over all of it, in its dtype and on its device.

    Which ones depends only on the shape. The result is a copy: the tensor may be changed in place afterwards.
    """
    tensor = to_local(tensor.detach())
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() == 1 and tensor.is_floating_point():  # fp8, for which few operators exist
        tensor = tensor.float()
    size = tensor.numel()
    if size <= count:
        return tensor.reshape(-1).clone()
    return torch.take(tensor, _places(size, count, tensor.device))


@lru_cache(maxsize=4096)
def _places(size: int, count: int, device: torch.device) -> Tensor:
    """Return which elements to take. A stride that divides a dimension would see one of its rows or columns only."""
    stride = max(1, int(size * _SCATTER))
    while gcd(stride, size) != 1:
        stride += 1
    return (torch.arange(count, dtype=torch.int64) * stride % size).to(device)


def shorter(values: Tensor, seen: Seen) -> Tensor:
    """Return of another step's sample of the same tensor the elements that `seen` has: fewer, after step 1."""
    count = len(seen.values)
    if count < len(values) == prod(seen.shape):
        return values[_places(len(values), count, values.device)]
    return values[:count]
