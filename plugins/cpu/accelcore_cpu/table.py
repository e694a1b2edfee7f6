"""The addresses that a kernel works with, and whether they are still right."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from accelcore_cpu.kernels.library import load

__all__ = ["TYPES", "Member", "Table"]

TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""What tensors can be, by the numbers that the kernels have for them."""

_STATES = 3


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
        entries: all state of the optimizer.
        by_row: the kernel looks at each row of a matrix.
    """

    def __init__(self, kind: int, members: Sequence[Member], entries: Sequence[Any], *, by_row: bool) -> None:
        self.members = members
        self.addresses = [member.value.data_ptr() for member in members]
        self.strides = [member.value.stride() for member in members]
        self.dtypes = [member.gradient for member in members]
        self.waiting = [number for number, member in enumerate(members) if member.waits]
        self.empty = [number for number, member in enumerate(members) if not member.value.numel()]
        self._entries = entries
        self._kept = list(chain.from_iterable(map(dict.values, self._entries)))
        sources, tensors = array("q"), array("q")
        for member in members:
            sources.extend(_source(member, len(tensors) // 4))
            for offset, shape in member.parts:
                tensors.extend(_tensor(offset, shape, by_row))
        self._library = load()
        self._plan = self._library.plan_new(
            kind, _fork(), sources.buffer_info()[0], len(members), tensors.buffer_info()[0], len(tensors) // 4
        )
        if not self._plan:
            raise MemoryError("there is no memory for the tables of an optimizer")
        weakref.finalize(self, self._library.plan_free, self._plan)

    def has(self, entries: Sequence[Any]) -> bool:
        """Whether these entries are still all there is, with the tensors that they had."""
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        kept = list(chain.from_iterable(map(dict.values, self._entries)))
        return len(kept) == len(self._kept) and all(map(is_, kept, self._kept))

    def step(
        self,
        gradients: Sequence[int],
        numbers: Sequence[Sequence[float]],
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update all that have a gradient, by the numbers of each group. Gradients are given by address, 0 for none."""
        addresses, options = array("Q", gradients), array("d", chain.from_iterable(numbers))
        done = self._library.plan_step(
            self._plan,
            addresses.buffer_info()[0],
            options.buffer_info()[0],
            len(numbers[0]),
            None if found_inf is None else found_inf.data_ptr(),
            None if grad_scale is None else grad_scale.data_ptr(),
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("there is no memory for the sums of an optimizer")


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


@cache
def _fork() -> int | None:
    """Where the OpenMP runtime that torch computes on starts threads; None where it has another way."""
    fork: Any = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if fork is None else ctypes.cast(fork, ctypes.c_void_p).value
