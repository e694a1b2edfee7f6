"""fp32 masters: what is trained in place of parameters that are held in low precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from accelcore.optim.gradient_memory import GradientMemory
from accelcore.optim.runs import Run
from accelcore.precision.table import LOW_PRECISION
from accelcore.training.gradients import Gradients

__all__ = ["Masters"]


class Masters(Gradients):
    """fp32 masters of parameters held in bf16 or fp16, and fp32 gradients for them; the rest as `inner` has it.

    A parameter that was written to by others since its last update (`load_state_dict`, an initialisation, other memory
    as its `data`) is noticed by its version and its address, and its master takes the new value before the next one.

    Args:
        inner: the gradients that backward leaves.
        before: those that these take the place of; a parameter that had a master keeps its value.
    """

    def __init__(self, inner: Gradients, before: Gradients) -> None:
        self._inner = inner
        self._low = [number for number, value in enumerate(inner.values) if value.dtype in LOW_PRECISION]
        self.values = [value.detach().float() if value.dtype in LOW_PRECISION else value for value in inner.values]
        self._gradients = list(self.values)
        for number in self._low:
            self._gradients[number] = torch.zeros_like(self.values[number])
        by_slot = zip(inner.slots, inner.trained(self.values), inner.trained(self._gradients), strict=True)
        masters = [
            (slot._replace(trained=m), g) if slot.parameter.dtype in LOW_PRECISION else (slot, None)
            for slot, m, g in by_slot
        ]
        super().__init__([slot for slot, _ in masters])
        self._gradients_by_slot = [gradient for _, gradient in masters]
        self._low_slots = [number for number, (_, gradient) in enumerate(masters) if gradient is not None]
        exact = {id(slot.parameter): slot.trained for slot in before.slots if slot.trained is not slot.parameter}
        with torch.no_grad():
            for slot in self.slots:
                if slot.trained is not slot.parameter and id(slot.parameter) in exact:
                    slot.trained.copy_(exact[id(slot.parameter)])
        self._kept = set(exact)
        self.note()

    def follow(self) -> None:
        now = self._versions()
        if now == self._noted:
            return
        self._inner.follow()
        with torch.no_grad():
            for slot, before, after in zip(self.slots, self._noted, now, strict=True):
                if before != after and slot.trained is not slot.parameter:
                    slot.trained.copy_(slot.parameter)
        self.note()

    def replicated(self) -> None:
        with torch.no_grad():
            for slot in self.slots:
                if slot.trained is not slot.parameter and id(slot.parameter) not in self._kept:
                    slot.trained.copy_(slot.parameter)
        self.note()

    def memories(self) -> Sequence[GradientMemory]:
        return self._inner.memories()

    def gather(self) -> None:
        self.follow()
        self._inner.gather()
        self.received = self._inner.received

    def cells(self) -> Sequence[Tensor | None]:
        cells = list(self._inner.cells())
        for number in self._low:
            cells[number] = None if cells[number] is None else self._gradients[number]
        return cells

    def pack(self) -> list[Tensor]:
        return self._inner.pack()

    def unpack(self) -> None:
        self._inner.unpack()
        self.received = self._inner.received

    def runs(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Run]:
        return self._inner.runs(values, gradients)

    def trained(self, values: Sequence[Tensor]) -> list[Tensor]:
        return self._inner.trained(values)

    def trained_runs(self) -> list[Run]:
        low, cells = set(self._low), self._inner.cells()
        gradients = [self._gradients[n] if n in low else cell for n, cell in enumerate(cells)]
        return self._inner.runs(self.values, gradients)

    def expose(self) -> None:
        self._inner.expose()
        for slot, gradient, received in zip(self.slots, self._gradients_by_slot, self.received, strict=True):
            if gradient is not None:
                slot.trained.grad = gradient if received else None

    def promote(self) -> None:
        cells = self._inner.cells()
        pairs = [(self._gradients[n], cell) for n in self._low if (cell := cells[n]) is not None]
        if pairs:
            torch._foreach_copy_(
                [gradient for gradient, _ in pairs], [cell.to_dense() if cell.is_sparse else cell for _, cell in pairs]
            )
        for number in self._low:  # single tensors are asked for their gradient
            self.values[number].grad = None if cells[number] is None else self._gradients[number]

    @torch.no_grad()
    def demote(self) -> None:
        lows, masters = [self._inner.values[n] for n in self._low], [self.values[n] for n in self._low]
        torch._foreach_copy_(lows, masters)
        increment_version(self.parameters)  # in flat memory they would not show that they were written to
        self.note()

    def note(self) -> None:
        self._noted = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
