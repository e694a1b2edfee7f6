"""The gradients of what is trained: one owner, in whatever memory they are.

Backward leaves gradients on the parameters, as torch does. At the end of a window they are gathered: as they are, or
into one piece of memory; then given to fp32 masters, where there are any. What exchanges, unscales, checks and clips
them walks `buffers`, and never the model or the optimizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.gradient_memory import GradientMemory
from accelcore.optim.memory import FlatMemory, by_kind, lay_flat
from accelcore.optim.runs import Run, Slot
from accelcore.roles.scaled_gradients import is_finite

__all__ = ["Flat", "Gradients", "PerTensor", "dense"]


class Gradients(ABC):
    """The gradients of a model's slots, from the first backward pass of a window to its update.

    Attributes:
        slots, parameters: what is trained; of each slot the model's parameter, on which backward leaves a gradient.
        values: what holds the parameters: each by itself, or pieces of memory of many.
        received: for each slot, whether it has a gradient; None is not zero. Known after `gather`.
    """

    slots: Sequence[Slot]
    values: Sequence[Tensor]
    received: list[bool]

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots, self.received = slots, []
        self.parameters = [slot.parameter for slot in slots]
        self._held: list[Tensor] = []

    def follow(self) -> None:  # noqa: B027  # most have nothing to do
        """Take over what others wrote to the parameters since the last update."""

    def memories(self) -> Sequence[GradientMemory]:
        """The pieces of memory that gradients are laid into, as far as there are any."""
        return ()

    def backward(self, loss: Tensor, start: Tensor | None, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, multiplied by `start`; None for 1."""
        memories = self.memories()
        if not memories or self._held:  # gradients whose memory is held stay where they are
            torch.autograd.backward(loss, start, retain_graph=retain_graph)
            return
        receiving = [memory for memory in memories if memory.takes_in]
        for memory in receiving:
            memory.receives = True
        try:
            torch.autograd.backward(loss, start, retain_graph=retain_graph)
        finally:
            for memory in receiving:
                memory.receives = False

    @abstractmethod
    def gather(self) -> None:
        """The backward passes of a window are done: see where their gradients are."""

    @abstractmethod
    def cells(self) -> Sequence[Tensor | None]:
        """The gradient of each of `values`."""

    def buffers(self) -> list[Tensor]:
        """All gradients, dense, as what is trained takes them; zeros for a slot in a piece of memory that has none."""
        return [dense(cell) for cell in self.cells() if cell is not None]

    @abstractmethod
    def pack(self) -> list[Tensor]:
        """For each dtype and device one 1-D tensor: the gradients of all slots, zeros where there is none, and behind
        them for each slot a 1 where it has one. Ranks make it their mean, in place.
        """

    @abstractmethod
    def unpack(self) -> None:
        """Take over what was made of what `pack` gave: a slot has a gradient now where it had one on any rank."""

    @abstractmethod
    def runs(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Run]:
        """What an optimizer is made of, over tensors that are laid out as `values`."""

    @abstractmethod
    def trained(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Tensors laid out as `values`, seen slot by slot."""

    def trained_runs(self) -> list[Run]:
        """What an optimizer is made of."""
        return self.runs(self.values, self.cells())

    def expose(self) -> None:  # noqa: B027
        """See that each trained tensor has its gradient as `grad`, for an optimizer that knows nothing of slots."""

    def promote(self) -> None:  # noqa: B027
        """Give the masters their gradients."""

    def demote(self) -> None:  # noqa: B027
        """Give the parameters the values of their masters."""

    def replicated(self) -> None:  # noqa: B027
        """All ranks have the parameters of rank 0 now: take them over, but for masters that ranks have in common."""

    def note(self) -> None:  # noqa: B027
        """Masters and parameters agree, whoever wrote to them last."""

    def first_not_finite(self) -> str | None:
        """The name of the first slot whose gradient has an inf or NaN in it. Waits for the device."""
        by_slot = zip(self.slots, self.trained(self.cells()), strict=True)  # type: ignore[arg-type]  # None passes
        return next((slot.name for slot, gradient in by_slot if gradient is not None and not is_finite(gradient)), None)

    @contextmanager
    def withheld(self, slots: Sequence[Slot]) -> Iterator[None]:
        """Let an update find no gradient of these, so that it leaves them as they are."""
        hidden, gradients = {id(slot.parameter) for slot in slots}, [slot.trained.grad for slot in slots]
        before = [(memory, memory.received) for memory in self.memories()]
        for slot in slots:
            slot.trained.grad = None
        for memory, received in before:
            memory.received = [had and id(p) not in hidden for p, had in zip(memory.parameters, received, strict=True)]
        try:
            yield
        finally:
            for slot, gradient in zip(slots, gradients, strict=True):
                slot.trained.grad = gradient
            for memory, received in before:
                memory.received = received

    def clear(self) -> None:
        """Drop all gradients, or set those that are held to zero."""
        if self._held:
            torch._foreach_zero_(self._held)
            return
        for parameter in self.parameters:
            parameter.grad = None

    def hold(self, names: Collection[str]) -> None:
        """Keep the memory of the gradients of these slots from now on: captured steps add to it."""
        for slot in self.slots:
            if slot.name in names:  # one that never came stays None: it is no zero
                slot.parameter.grad = torch.zeros_like(slot.parameter)
                self._held.append(slot.parameter.grad)

    def release(self) -> None:
        """Hold no memory any more."""
        self._held.clear()

    def state(self) -> dict[str, Tensor]:
        """The gradients of an open window, by name, in the parameters' shapes."""
        return {slot.name: slot.parameter.grad for slot in self.slots if slot.parameter.grad is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Be in an open window again."""
        for slot in self.slots:
            gradient = state.get(slot.name)
            slot.parameter.grad = None if gradient is None else torch.empty_like(slot.parameter).copy_(gradient)


class PerTensor(Gradients):
    """Gradients as backward left them, one tensor for each parameter."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self.values = self.parameters
        self._memories: list[GradientMemory] = []

    def memories(self) -> Sequence[GradientMemory]:
        return self._memories

    def gather(self) -> None:
        self.received = [parameter.grad is not None for parameter in self.parameters]

    def cells(self) -> Sequence[Tensor | None]:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        return [parameter.grad for parameter in self.parameters]

    def pack(self) -> list[Tensor]:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self.parameters):
            raise TrainingError(
                "a gradient is sparse, and this way of exchanging gradients takes dense ones",
                remedy='say parallel="ddp", or make the embedding with sparse=False',
            )
        if not self._memories or not all(memory.fits for memory in self._memories):
            self._memories = [GradientMemory([slot.parameter for slot in alike]) for alike in by_kind(self.slots)]
        for memory in self._memories:
            memory.gather()
        return [memory.pack() for memory in self._memories]

    def unpack(self) -> None:
        for memory in self._memories:
            memory.unpack()
            memory.expose(memory.parameters)
        self.gather()

    def runs(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Run]:
        return [Run([slot], value) for slot, value in zip(self.slots, values, strict=True)]

    def trained(self, values: Sequence[Tensor]) -> list[Tensor]:
        return list(values)


class Flat(Gradients):
    """Parameters and gradients in one piece of memory each, for every dtype and device.

    Args:
        slots: what is trained.
        together: for each group, the number of the one that it may be updated with; none: each by itself.
    """

    def __init__(self, slots: Sequence[Slot], together: Sequence[int] = ()) -> None:
        self._memories: list[FlatMemory] = lay_flat(slots, together)
        super().__init__(list(chain.from_iterable(memory.slots for memory in self._memories)))
        self.values = [memory.values for memory in self._memories]
        self._cells = [memory.gradients for memory in self._memories]

    def memories(self) -> Sequence[GradientMemory]:
        return self._memories

    def follow(self) -> None:
        for memory in self._memories:
            memory.follow()

    def clear(self) -> None:
        super().clear()
        for memory in self._memories:
            memory.received = [False] * len(memory.slots)

    def gather(self) -> None:
        self.follow()
        for memory in self._memories:
            memory.gather()
        self._look()

    def cells(self) -> Sequence[Tensor | None]:
        return self._cells

    def pack(self) -> list[Tensor]:
        return [memory.pack() for memory in self._memories]

    def unpack(self) -> None:
        for memory in self._memories:
            memory.unpack()
        self._look()

    def runs(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Run]:
        pieces = zip(self._memories, values, gradients, strict=True)
        return [
            run for memory, value, gradient in pieces if gradient is not None for run in memory.runs(value, gradient)
        ]

    def trained(self, values: Sequence[Tensor]) -> list[Tensor]:
        pieces = zip(self._memories, values, strict=True)
        return list(chain.from_iterable(memory.layout.views(value) for memory, value in pieces))

    def expose(self) -> None:
        for memory in self._memories:
            memory.expose(slot.trained for slot in memory.slots)

    def _look(self) -> None:
        first, *others = self._memories
        self.received = first.received if not others else [flag for each in self._memories for flag in each.received]


def dense(gradient: Tensor) -> Tensor:
    """The values of a gradient, in memory that can be written to."""
    return gradient.values() if gradient.is_sparse else gradient
