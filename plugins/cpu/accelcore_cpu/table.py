"""The addresses that a kernel works with, and whether they are still right."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accelcore_cpu.kernels.library import load

__all__ = ["TYPES", "Found", "Member", "Table"]

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""What tensors can be, by the numbers that the kernels have for them."""

_STATES = 3
_IMPLEMENTATION = attrgetter("_cdata")


class Found(IntEnum):
    """What became of a look for the gradients of a table."""

    ALL = 0
    REPLACED = 1
    """A value or state has other memory than it had, or one that waited for its first gradient has it."""
    UNLIKE = 2
    """A gradient is not laid out as its value."""


@dataclass
class Member:
    """A tensor that is updated.

    Attributes:
        group: the number of its group.
        value: the tensor, dense, and of one of `TYPES`.
        gradient: the dtype of its gradients.
        entry: its state.
        states: of that, what belongs to elements, in the kernel's order; None where there is none.
        parts: the offsets and shapes of the parameters in it, where the kernel has to tell them apart.
        waits: it has had no gradient yet, and so no state.
    """

    group: int
    value: Tensor
    gradient: torch.dtype
    entry: dict[str, Any]
    states: Sequence[Tensor | None]
    parts: Sequence[tuple[int, torch.Size]]
    waits: bool


class Table:
    """What one kernel updates.

    Args:
        kind: the kernel's number.
        members: what there is, in order.
        groups: the tensors of each group.
        entries: all state of the optimizer.
        by_row: the kernel looks at each row of a matrix.
    """

    def __init__(
        self,
        kind: int,
        members: Sequence[Member],
        groups: Sequence[Sequence[Tensor]],
        entries: Sequence[dict[str, Any]],
        *,
        by_row: bool,
    ) -> None:
        self.members = members
        self._values = [member.value for member in members]
        self._entries = entries
        self._kept = list(chain.from_iterable(map(dict.values, entries)))
        self._alike = all(member.gradient is member.value.dtype for member in members)
        sources, tensors = array("q"), array("q")
        for member in members:
            sources.extend(_source(member, len(tensors) // 4))
            for offset, shape in member.parts:
                tensors.extend(_tensor(offset, shape, by_row))
        self._library = load()
        self._plan = self._library.plan_new(
            kind, _fork(), _memory(sources), len(members), _memory(tensors), len(tensors) // 4
        )  # fmt: skip
        self._addresses = array("q", bytes(8 * len(members)))
        self._tensors = self._watch([kept for kept in self._kept if _is_dense(kept)])
        self._objects = self._remember(groups)
        if not self._plan or not self._tensors or not self._objects:
            raise MemoryError("there is no memory for the tables of an optimizer")
        weakref.finalize(self, self._library.plan_free, self._plan)
        weakref.finalize(self, self._library.tensors_free, self._tensors)
        weakref.finalize(self, self._library.objects_free, self._objects)

    def of(self, groups: Sequence[Sequence[Tensor]], state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether these are the tensors it updates, and this is all state there is, with the tensors that it had."""
        if not all(isinstance(group, list) for group in groups):
            return False
        lists = _addresses(groups)
        return bool(self._library.objects_same(self._objects, _memory(lists), len(lists), id(state)))

    def find(self) -> Found:
        """Look for the gradients, for the next step."""
        found = Found(self._library.tensors_find(self._tensors, _memory(self._addresses)))
        return Found.UNLIKE if found is Found.ALL and not self._alike else found

    def place(self, addresses: Sequence[int]) -> None:
        """Give the addresses of gradients that could not be found, 0 where there is none, for the next step."""
        self._addresses = array("q", addresses)

    def step(self, numbers: Sequence[Sequence[float]], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update all that have a gradient, by the numbers of each group."""
        options = array("d", chain.from_iterable(numbers))
        done = self._library.plan_step(
            self._plan,
            _memory(self._addresses),
            _memory(options),
            len(numbers[0]),
            None if found_inf is None else found_inf.data_ptr(),
            None if grad_scale is None else grad_scale.data_ptr(),
            torch.get_num_threads(),
        )
        if not done or not self._library.tensors_updated(self._tensors, _memory(self._addresses)):
            raise MemoryError("there is no memory for the sums of an optimizer")

    def _watch(self, states: Sequence[Tensor]) -> int | None:
        """What finds gradients, and sees whether anything was given other memory since."""
        known = [array("q", map(_IMPLEMENTATION, tensors)) for tensors in (self._values, states)]
        addresses = [array("q", map(Tensor.data_ptr, tensors)) for tensors in (self._values, states)]
        waits = array("b", [member.waits for member in self.members])
        objects = _addresses(self._values)
        made: int | None = self._library.tensors_new(
            _memory(objects), _offset(), _memory(known[0]), _memory(addresses[0]), _memory(waits), len(self._values),
            _memory(known[1]), _memory(addresses[1]), len(states),
        )  # fmt: skip
        return made

    def _remember(self, groups: Sequence[Sequence[Tensor]]) -> int | None:
        """What sees whether an object was put in the place of another since."""
        sizes = array("q", map(len, groups))
        items, entries, kept = map(_addresses, (self._values, self._entries, self._kept))
        made: int | None = self._library.objects_new(
            _memory(_python()), _memory(sizes), len(sizes), _memory(items),
            _memory(entries), len(entries), _memory(kept), len(kept),
        )  # fmt: skip
        return made


def _source(member: Member, first_tensor: int) -> list[int]:
    """As `Source` in kernels/plan.h."""
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
    """As `Tensor` in kernels/plan.h."""
    if by_row and len(shape) > 1 and shape.numel():
        return [offset, shape[0], shape.numel() // shape[0], 1]
    return [offset, 1, shape.numel(), 0]


def _addresses(objects: Sequence[object]) -> array[Any]:
    return array("q", map(id, objects))


def _memory(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]


def _is_dense(kept: object) -> bool:
    return isinstance(kept, Tensor) and kept.layout is torch.strided


@cache
def _offset() -> int:
    """Where in Python's object of a tensor its `_cdata` is, in bytes."""
    tensor = torch.empty(0)
    words = range(object.__basicsize__, Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p))
    return next(word for word in words if ctypes.c_void_p.from_address(id(tensor) + word).value == tensor._cdata)


@cache
def _python() -> array[Any]:
    """As `Python` in kernels/objects.cpp."""
    lending = (getattr(ctypes.pythonapi, name) for name in ("PyDict_Next", "PyList_Size", "PyList_GetItem"))
    return array("q", [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in lending])


@cache
def _fork() -> int | None:
    """Where the OpenMP runtime that torch computes on starts threads; None where it has another way."""
    fork: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if fork is None else ctypes.cast(fork, ctypes.c_void_p).value
