"""fp32 masters: the optimizer updates them instead of parameters in low precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from accelcore.precision.o1.table import LOW_PRECISION
from accelcore.training.gradients.base import Gradients, by_slot

__all__ = ["Masters"]


class Masters(Gradients):
    """fp32 masters of bf16 and fp16 parameters, and fp32 gradients for them; other parameters are left to `inner`.

    A parameter that others wrote to since its last update (`load_state_dict`, an initialisation, other memory as its
    `data`) has another version or address. Its master then takes the new value, unless that is the master's own,
    rounded.
    `inner`: the gradients that backward leaves. `before`: the gradients that these replace; its masters keep their
    values.
    """

    def __init__(self, inner: Gradients, before: Gradients) -> None:
        self._inner = inner
        self._low = [number for number, value in enumerate(inner.values) if value.dtype in LOW_PRECISION]
        values = [value.detach().float() if value.dtype in LOW_PRECISION else value for value in inner.values]
        self._gradients = list(values)
        for number in self._low:
            self._gradients[number] = torch.zeros_like(values[number])
        by_number = zip(inner.slots, by_slot(inner, values), by_slot(inner, self._gradients), strict=True)
        masters = [
            (slot._replace(trained=m), g) if slot.parameter.dtype in LOW_PRECISION else (slot, None)
            for slot, m, g in by_number
        ]
        super().__init__([slot for slot, _ in masters])
        self.values, self.flat, self.memories = values, inner.flat, inner.memories
        self._gradients_by_slot = [gradient for _, gradient in masters]
        self._low_slots = [number for number, (_, gradient) in enumerate(masters) if gradient is not None]
        exact = {id(slot.parameter): slot.trained for slot in before.slots if slot.trained is not slot.parameter}
        with torch.no_grad():
            for slot in self.slots:
                if slot.trained is not slot.parameter and id(slot.parameter) in exact:
                    slot.trained.copy_(exact[id(slot.parameter)])
        self._seen: list[tuple[int, int]] = []  # nothing yet: ranks may still receive rank 0's parameters

    def refresh(self) -> None:
        now = self._versions()
        if now == self._seen:
            return
        self._inner.refresh()
        with torch.no_grad():
            for number in self._low_slots:
                slot = self.slots[number]
                written = not self._seen or self._seen[number] != now[number]
                if written and not torch.equal(slot.trained.to(slot.parameter), slot.parameter):
                    slot.trained.copy_(slot.parameter)
        self._seen = self._versions()

    def collect(self) -> None:
        self.refresh()
        self._inner.collect()
        self.received = self._inner.received

    def reduce(self, mean: Callable[[Tensor], None]) -> None:
        self._inner.reduce(mean)
        self.received = self._inner.received

    def of_values(self) -> Sequence[Tensor | None]:
        gradients = list(self._inner.of_values())
        for number in self._low:
            gradients[number] = None if gradients[number] is None else self._gradients[number]
        return gradients

    def expose(self) -> None:
        self._inner.expose()
        for slot, gradient, received in zip(self.slots, self._gradients_by_slot, self.received, strict=True):
            if gradient is not None:
                slot.trained.grad = gradient if received else None

    def grads_to_masters(self) -> None:
        gradients = self._inner.of_values()
        pairs = [(self._gradients[n], own) for n in self._low if (own := gradients[n]) is not None]
        if pairs:
            torch._foreach_copy_(
                [master for master, _ in pairs], [own.to_dense() if own.is_sparse else own for _, own in pairs]
            )
        for number in self._low:  # an optimizer reads the gradient of a single tensor from `grad`
            self.values[number].grad = None if gradients[number] is None else self._gradients[number]

    @torch.no_grad()
    def masters_to_params(self) -> None:
        lows, masters = [self._inner.values[n] for n in self._low], [self.values[n] for n in self._low]
        torch._foreach_copy_(lows, masters)
        increment_version(self.parameters)  # writing to flat memory does not increment it
        self._seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(parameter._version, parameter.data_ptr()) for parameter in self.parameters]
