"""Slots, the trained parameters, and runs, the slots that an optimizer updates as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from accelcore.optim.flat.memory import GradientMemory

__all__ = ["Run", "Slot"]


class Slot(NamedTuple):
    """A trained parameter.

    Attributes:
        name: as in `model.named_parameters()`; tied parameters have one slot.
        group: the number of its parameter group.
        parameter: the parameter of the model.
        trained: the tensor that the optimizer updates: the parameter or its fp32 master.
    """

    name: str
    group: int
    parameter: nn.Parameter
    trained: Tensor


class Run:
    """Tensor that an optimizer updates: a parameter, or a stretch of flat memory with several parameters.

    The parameters of a stretch share their history: all of them received a gradient in the same steps.

    Args:
        slots: its parameters, of one parameter group or of groups with equal options.
        value: the tensor; 1-D if there is a `memory`.
        gradient: has the layout of `value`; None if `value.grad` is set elsewhere.
        memory: the flat memory of which it is a stretch.
        first: the number of its first slot in that memory.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        value: Tensor,
        gradient: Tensor | None = None,
        memory: GradientMemory | None = None,
        first: int = 0,
    ) -> None:
        self.slots, self.value, self.gradient, self.memory = slots, value, gradient, memory
        self.group, self.first, self.last = slots[0].group, first, first + len(slots)

    @property
    def received(self) -> Sequence[bool]:
        """For each slot, whether it has a gradient now."""
        if self.memory is None:
            return [self.value.grad is not None]
        return self.memory.received[self.first : self.last]

    @property
    def groups(self) -> set[int]:
        """The numbers of its slots' groups; `group` is the first of them."""
        return {slot.group for slot in self.slots}

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return views, one for each slot, of a tensor with the layout of `value`."""
        return [tensor] if self.memory is None else self.memory.layout.views(tensor, self.first, self.last)

    def split(self, edges: Sequence[int]) -> list[Run]:
        """Split it before the slots with these numbers in its memory."""
        return [self._between(begin, end) for begin, end in pairwise([self.first, *edges, self.last])]

    def by_slot(self) -> list[Run]:
        """Return a run for each slot, in the shape of its parameter, for an optimizer that must tell them apart."""
        if self.memory is None:
            return [self]
        values = self.parts(self.value)
        gradients = [None] * len(values) if self.gradient is None else self.parts(self.gradient)
        places = enumerate(zip(self.slots, values, gradients, strict=True), self.first)
        return [Run([slot], value, gradient, self.memory, number) for number, (slot, value, gradient) in places]

    def cut(self, tensor: Tensor, part: Run) -> Tensor:
        """Return the stretch of a tensor with the layout of `value` that belongs to `part`, a result of `split`."""
        assert self.memory is not None
        begin, start, end = (self.memory.layout.offsets[number] for number in (self.first, part.first, part.last))
        return tensor[start - begin : end - begin]

    def _between(self, begin: int, end: int) -> Run:
        part = Run(self.slots[begin - self.first : end - self.first], self.value, None, self.memory, begin)
        part.value = self.cut(self.value, part)
        part.gradient = None if self.gradient is None else self.cut(self.gradient, part)
        return part
