"""Batches in every kind of container, every kind of view, and numbers of all bits."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    """A record that cannot be changed."""

    tensor: Any
    name: str = "name"


@dataclass
class Record:
    """A record."""

    tensor: Any
    name: str = "name"


class Named(dict[str, Any]):
    """A user's dict class."""


class Encoding(UserDict[str, Any]):
    """A batch that moves itself."""

    def to(self, device: torch.device) -> Encoding:
        """Return the batch on a device."""
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor, 7],
    "tuple": lambda tensor: (tensor, "text", None),
    "dict": lambda tensor: {"a": tensor, 1: "text"},
    "nested": lambda tensor: {"a": [({"b": tensor}, None)]},
    "namedtuple": lambda tensor: Pair(tensor, None),
    "namedtuple in a list": lambda tensor: [Pair([tensor], tensor)],
    "named result": lambda tensor: torch.stack([tensor, tensor]).max(0),
    "dataclass": lambda tensor: Record([tensor]),
    "frozen dataclass": lambda tensor: {"a": Frozen(tensor)},
    "dict of its own": lambda tensor: Named(a=tensor),
    "ordered dict": lambda tensor: OrderedDict(b=tensor, a=1),
    "dict with a default": lambda tensor: defaultdict(list, a=tensor),
    "read-only mapping": lambda tensor: MappingProxyType({"a": tensor}),
    "what moves itself": lambda tensor: Encoding(a=tensor),
    "packed sequence": lambda tensor: pack_sequence([tensor]),
}
"""A batch of each kind, made of a vector."""

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda base: base,
    "column": lambda base: base[:, 1],
    "row": lambda base: base[2],
    "transposed": lambda base: base.t(),
    "every other": lambda base: base[:, ::2],
    "odd offset": lambda base: base.view(-1)[5:12],
    "block": lambda base: base[1:3, 2:5],
    "channels last": lambda base: base.view(1, 4, 3, 2).permute(0, 3, 1, 2),
    "element": lambda base: base[1, 2],
    "nothing": lambda base: base[:0],
}
"""A view of each kind of a matrix of 4 rows and 6 columns."""


@lru_cache(maxsize=64)
def bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return numbers of all kinds: any bits, and of fractions also zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(9)
    size = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    found = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        found[:5] = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1 / 3]).to(dtype)
    return found.view(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same numbers, the sign of 0 and NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    both = one.isnan() & other.isnan()
    return bool((both | ((one == other) & (one.signbit() == other.signbit()))).all())


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch that belong on the device."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, PackedSequence):
        return [batch.data]  # the sizes beside it stay on the host
    return [tensor for part in _parts(batch) for tensor in tensors_in(part)]


def described(batch: Any) -> Any:
    """Return the types, names and values of a batch in order, without its device."""
    if isinstance(batch, Tensor):
        return str(batch.dtype), batch.tolist()
    names = list(batch) if isinstance(batch, Mapping) else None
    plain = None if _parts(batch) else batch
    return type(batch).__name__, names, getattr(batch, "default_factory", None), plain, *map(described, _parts(batch))


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return [batch.tensor, batch.name] if isinstance(batch, Record | Frozen) else []
