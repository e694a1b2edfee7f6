"""What an optimizer updates: slots, which are parameters, and runs, which are slots that are updated as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from accelcore.optim.gradient_memory import GradientMemory

__all__ = ["Run", "Slot"]


class Slot(NamedTuple):
    """One parameter that is trained.

    Attributes:
        name: as in `model.named_parameters()`; tied parameters have one slot.
        group: the number of its parameter group.
        parameter: what forward and backward use.
        trained: what the optimizer updates: the parameter itself, or its fp32 master.
    """

    name: str
    group: int
    parameter: nn.Parameter
    trained: Tensor


class Run:
    """What an optimizer updates as one: a tensor, or a stretch of flat memory whose parameters share their history.

    Parameters share it as long as all of them received a gradient in the same steps.

    Args:
        slots: theirs, all of one parameter group, or of groups with equal options.
        value: what is updated; 1-D where there is a `memory`.
        gradient: laid out as `value`; None where `value.grad` is set elsewhere.
        memory: what it is a stretch of.
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
        """The numbers of its slots' groups; its own is the first of them."""
        return {slot.group for slot in self.slots}

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """A tensor that is laid out as `value`, seen as one tensor for each slot."""
        return [tensor] if self.memory is None else self.memory.layout.views(tensor, self.first, self.last)

    def split(self, edges: Sequence[int]) -> list[Run]:
        """The stretches between its beginning, the slots of these numbers in its memory, and its end."""
        return [self._between(begin, end) for begin, end in pairwise([self.first, *edges, self.last])]

    def by_slot(self) -> list[Run]:
        """A run for each slot, in the shape of its parameter, for an optimizer that must tell parameters apart."""
        if self.memory is None:
            return [self]
        values = self.parts(self.value)
        gradients = [None] * len(values) if self.gradient is None else self.parts(self.gradient)
        places = enumerate(zip(self.slots, values, gradients, strict=True), self.first)
        return [Run([slot], value, gradient, self.memory, number) for number, (slot, value, gradient) in places]

    def cut(self, tensor: Tensor, part: Run) -> Tensor:
        """What of a tensor laid out as `value` belongs to `part`, one of those that `split` gave."""
        assert self.memory is not None
        begin, start, end = (self.memory.layout.offsets[number] for number in (self.first, part.first, part.last))
        return tensor[start - begin : end - begin]

    def _between(self, begin: int, end: int) -> Run:
        part = Run(self.slots[begin - self.first : end - self.first], self.value, None, self.memory, begin)
        part.value = self.cut(self.value, part)
        part.gradient = None if self.gradient is None else self.cut(self.gradient, part)
        return part
