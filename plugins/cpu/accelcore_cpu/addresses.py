"""Addresses that a kernel reads and writes, and the check that they are still right."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import chain
from operator import attrgetter
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from accelcore_cpu.kernels.library import load

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that kernels take, by their numbers in kernels/memory.h."""

_STATES = 3
_torchs = attrgetter("_cdata")  # the address of torch's C++ object behind a tensor


class Found(IntEnum):
    """Result of the search for the next gradients, by the numbers in kernels/tensors.cpp."""

    ALL = 0
    REPLACED = 1
    """A tensor has other memory or another layout than it had, or one that waited has its first gradient."""
    UNLIKE = 2
    """A gradient is not laid out as its value."""


_FOUND = tuple(Found)  # to look up a member takes a tenth of the time that Found(number) takes


@dataclass
class Member:
    """A tensor that is updated."""

    group: int  # the number of its group
    value: Tensor  # dense, and of one of `TYPES`
    gradient: torch.dtype  # of its gradients
    entry: dict[str, Any]  # its state
    states: Sequence[Tensor | None]  # its elementwise state, in the kernel's order; None for one that is not used
    parts: Sequence[tuple[int, torch.Size]]  # offsets and shapes of its parameters, if the kernel tells them apart
    waits: bool  # whether it has had no gradient yet, and so no state


class Addresses:
    """Addresses of the tensors that one kernel updates; `entries` are all state of the optimizer."""

    def __init__(
        self, kernel: str, members: Sequence[Member], entries: Sequence[dict[str, Any]], *, by_row: bool
    ) -> None:
        self.members = members
        values = [member.value for member in members]
        # Held, as members are, so that torch gives no other tensor the address of one of these.
        self._kept = list(chain.from_iterable(map(dict.values, entries)))
        self._own_dtype = all(member.gradient is member.value.dtype for member in members)
        sources, parts = array("q"), array("q")
        for member in members:
            sources.extend(_source(member, len(parts) // 4))
            for offset, shape in member.parts:
                parts.extend(_tensor(offset, shape, by_row))
        objects = _objects(values, self._kept)
        waits = bytes(member.waits for member in members)
        self._library = load()
        tables = _memory(sources), len(members), _memory(parts), len(parts) // 4
        self._plan = self._made("plan", kernel.encode(), _fork(), *tables)
        self._pack = Struct(f"{len(objects)}P").pack  # an array takes twice as long
        self._tensors = self._made("tensors", self._pack(*objects), len(objects), waits, len(waits))
        self._count = len(objects)
        self._addresses = array("q", bytes(8 * len(members)))

    def _made(self, what: str, *arguments: Any) -> int:
        """Return what the library makes of the arguments, to be freed with this object."""
        made: int | None = getattr(self._library, f"{what}_new")(*arguments)
        if made is None:
            raise MemoryError("there is no memory for the tables of an optimizer")
        weakref.finalize(self, getattr(self._library, f"{what}_free"), made)
        return made

    def find(self, groups: Sequence[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> Found:
        """Look at the memory of all tensors in the groups and the state, and find the gradients for the next step."""
        values = chain.from_iterable([group["params"] for group in groups])
        objects = _objects(values, chain.from_iterable(map(dict.values, state.values())))
        if len(objects) != self._count:
            return Found.REPLACED
        found = _FOUND[self._library.tensors_find(self._tensors, self._pack(*objects), _memory(self._addresses))]
        return Found.UNLIKE if found is Found.ALL and not self._own_dtype else found

    def place(self, addresses: Sequence[int]) -> None:
        """Take these addresses of gradients for the next step; 0 for a tensor without gradient."""
        self._addresses = array("q", addresses)

    def step(self, numbers: Sequence[Sequence[float]], grad_scale: float) -> None:
        """Update all tensors that have a gradient, by the numbers of each group."""
        self._library.tensors_bump_versions(self._tensors, _memory(self._addresses))
        options = array("d", chain.from_iterable(numbers))
        done = self._library.plan_step(
            self._plan, _memory(self._addresses), _memory(options), len(numbers[0]), grad_scale, torch.get_num_threads()
        )
        if not done:
            raise MemoryError("there is no memory for the sums of an optimizer")

    def release(self) -> None:
        """Hold the gradients no longer."""
        self._library.tensors_release(self._tensors)


def _source(member: Member, first_tensor: int) -> list[int]:
    """Return a `Source` of kernels/plan.h."""
    states = [0 if state is None else state.data_ptr() for state in member.states]
    kind = next((TYPES[state.dtype] for state in member.states if state is not None), TYPES[member.value.dtype])
    return [
        member.value.data_ptr(),
        *states,
        *[0] * (_STATES - len(states)),
        member.entry["step"].data_ptr() if "step" in member.entry else 0,
        TYPES[member.value.dtype],
        kind,
        TYPES[member.gradient],
        member.group,
        first_tensor,
    ]


def _tensor(offset: int, shape: torch.Size, by_row: bool) -> list[int]:
    """Return a `Tensor` of kernels/plan.h."""
    if by_row and len(shape) > 1 and shape.numel():
        return [offset, shape[0], shape.numel() // shape[0], 1]
    return [offset, 1, shape.numel(), 0]


def _objects(values: Iterable[Tensor], kept: Iterable[object]) -> list[int]:
    """Return the addresses of torch's objects behind values and state. A state that is no tensor has none."""
    tensors = [*values, *kept]
    try:
        return list(map(_torchs, tensors))
    except AttributeError:
        return [_torchs(tensor) for tensor in tensors if isinstance(tensor, Tensor)]


def _memory(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


@cache
def _fork() -> int | None:
    """Return the function by which torch's OpenMP runtime starts threads; None if torch uses another runtime."""
    fork: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if fork is None else ctypes.cast(fork, ctypes.c_void_p).value
