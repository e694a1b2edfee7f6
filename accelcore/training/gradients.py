"""Gradients of the trained parameters, each in a tensor of its own or all in flat memory.

Backward leaves gradients on the parameters, as torch does. At the end of a window `collect` finds them, and may
copy them into flat memory. Then ranks reduce them, and fp32 masters receive them. Unscaling, checking and clipping walk
`buffers`, and never the model or the optimizer.

The optimizer reads the same memory: an optimizer of accelcore by the runs that it is bound to (`optim/binding.py`),
any other by the `grad` that `expose` sets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from accelcore.errors import TrainingError
from accelcore.optim.flat.memory import FlatMemory, GradientMemory, Slot, by_kind, lay_flat
from accelcore.optim.shards import as_shard, to_local
from accelcore.precision.policy import LOW_PRECISION
from accelcore.scaling.contract import resolved
from accelcore.torch_internals import run_backward

Value = TypeVar("Value", Tensor, "Tensor | None")

_GRAD = attrgetter("grad")


class Gradients(ABC):
    """The gradients of a model's slots, from the first backward pass of a window to its update."""

    slots: Sequence[Slot]  # the trained parameters, and what the optimizer updates in their place
    values: Sequence[Tensor]  # the tensors that hold the parameters: one tensor each, or one flat tensor for many
    flat: Sequence[FlatMemory | None]  # the flat memory of each of `values`; None for a tensor that is not flat
    memories: Sequence[GradientMemory]  # the memory that gradients are copied into, if any
    received: list[bool]  # for each slot, whether it has a gradient; None is not zero. Known after `collect`.

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots, self.received, self.memories = slots, [], []
        self.parameters = [slot.parameter for slot in slots]
        self.held: list[Tensor] = []  # keep their memory when they are cleared, because captured graphs add to it

    def refresh(self, *, thorough: bool = False) -> None:  # most have nothing to do
        """Take over what others wrote to parameters; if `thorough`, compare all values: `.data` leaves no trace."""

    @abstractmethod
    def collect(self) -> None:
        """Find the gradients of a window, after its backward passes; resolve negative and conjugate bits."""

    def reduce(self, mean: Callable[[Tensor], None]) -> None:
        """Average the gradients over ranks. `mean` does so in place, for a packed tensor of each dtype and device.

        A packed tensor has the gradients of all slots, with zeros for a slot without one, and then a flag for each
        slot: 1 if it has a gradient. Afterwards a slot has a gradient if it had one on any rank.
        """
        for memory in self.memories:
            mean(memory.pack())
        for memory in self.memories:
            memory.unpack()

    @abstractmethod
    def of_values(self) -> Sequence[Tensor | None]:
        """Return the gradient of each of `values`; sparse gradients are coalesced first."""

    def buffers(self) -> list[Tensor]:
        """Return all gradients, dense, as the optimizer takes them; flat memory has zeros for a slot without one.

        They may be multiplied in place.
        """
        for memory in self.memories:
            memory.is_written = True
        found = (gradient for gradient in self.of_values() if gradient is not None)
        return [gradient.values() if gradient.is_sparse else gradient for gradient in found]

    def expose(self) -> None:
        """Set `grad` of each trained tensor, for an optimizer that does not know of slots."""

    def grads_to_masters(self) -> None:
        """Give fp32 masters the gradients of their parameters."""

    def masters_to_params(self) -> None:
        """Give the parameters the values of their fp32 masters."""

    def clear(self) -> None:
        """Drop all gradients; set held gradients to zero."""
        if self.held:
            torch._foreach_zero_(self.held)
        else:
            for parameter in self.parameters:
                parameter.grad = None
        for memory in self.memories:
            memory.received = [False] * len(memory.parameters)

    def state(self) -> dict[str, Tensor]:
        """Return the gradients of an open window by name; for a sharded parameter, this rank's shard."""
        gradients = ((slot.name, slot.parameter.grad) for slot in self.slots)
        return {name: to_local(gradient) for name, gradient in gradients if gradient is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the gradients of an open window."""
        with torch.no_grad():
            for slot in self.slots:
                saved, parameter = state.get(slot.name), slot.parameter
                own = None if saved is None else torch.empty_like(to_local(parameter)).copy_(saved)
                parameter.grad = None if own is None else as_shard(own, parameter)


class PerTensor(Gradients):
    """Gradients as backward left them, one tensor for each parameter."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self.values, self.flat = self.parameters, [None] * len(slots)
        self.memories: list[GradientMemory] = []
        self._is_complex = any(map(Tensor.is_complex, self.parameters))

    def collect(self) -> None:
        gradients = list(map(_GRAD, self.parameters))
        self.received = [gradient is not None for gradient in gradients]
        # A real gradient can have the negative bit only.
        if self._is_complex or True in map(Tensor.is_neg, compress(gradients, self.received)):
            resolved(list(compress(self.parameters, self.received)))

    def reduce(self, mean: Callable[[Tensor], None]) -> None:
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self.parameters):
            remedy = 'make the embedding with sparse=False, or choose parallel="ddp" and have full windows only'
            raise TrainingError("a gradient is sparse, and this strategy exchanges dense gradients only", remedy=remedy)
        if not self.memories or not all(memory.fits for memory in self.memories):
            self.memories[:] = [GradientMemory([slot.parameter for slot in alike]) for alike in by_kind(self.slots)]
        for memory in self.memories:
            memory.collect()
        super().reduce(mean)
        for memory in self.memories:
            memory.expose(memory.parameters)
        self.collect()

    def of_values(self) -> Sequence[Tensor | None]:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        return [parameter.grad for parameter in self.parameters]


class Flat(Gradients):
    """Parameters and gradients in flat memory, a piece of each for every dtype and device; `joint`: see `lay_flat`."""

    memories: Sequence[FlatMemory]

    def __init__(self, slots: Sequence[Slot], joint: Sequence[int]) -> None:
        memories = lay_flat(slots, joint)
        super().__init__(list(chain.from_iterable(memory.slots for memory in memories)))
        self.memories = self.flat = memories
        self.values = [memory.values for memory in memories]

    def refresh(self, *, thorough: bool = False) -> None:
        for memory in self.memories:
            memory.refresh()

    def collect(self) -> None:
        self.refresh()
        for memory in self.memories:
            memory.collect()
        self._read_received()

    def reduce(self, mean: Callable[[Tensor], None]) -> None:
        super().reduce(mean)
        self._read_received()

    def of_values(self) -> Sequence[Tensor | None]:
        return [memory.gradients for memory in self.memories]

    def expose(self) -> None:
        for memory in self.memories:
            memory.expose(slot.trained for slot in memory.slots)

    def _read_received(self) -> None:
        self.received = list(chain.from_iterable(memory.received for memory in self.memories))


class ShardedGradients(PerTensor):
    """Gradients of DTensors. After backward, they are reduced over all ranks.

    An optimizer of accelcore updates this rank's shards as plain tensors, in the same memory; another optimizer has the
    DTensors in its groups.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__(slots)
        self.values = [to_local(slot.parameter) for slot in slots]

    def refresh(self, *, thorough: bool = False) -> None:
        for slot, value in zip(self.slots, self.values, strict=True):
            now = to_local(slot.parameter)
            if now.data_ptr() != value.data_ptr():
                if (now.dtype, now.device, now.shape) != (value.dtype, value.device, value.shape):
                    raise TrainingError(
                        f"the parameter {slot.name!r} is {now.dtype} on {now.device}, and was {value.dtype} on "
                        f"{value.device}",
                        why="it was changed after the trainer was made",
                        remedy="move and cast the model before the trainer is made, or make a new trainer",
                    )
                value.data = now

    def collect(self) -> None:
        self.refresh()
        super().collect()
        for value, gradient in zip(self.values, self.of_values(), strict=True):
            value.grad = gradient  # an optimizer of accelcore reads it

    def of_values(self) -> Sequence[Tensor | None]:
        return [None if parameter.grad is None else to_local(parameter.grad) for parameter in self.parameters]

    def clear(self) -> None:
        super().clear()
        for value in self.values:
            value.grad = None


class Masters(Gradients):
    """fp32 masters of bf16 and fp16 parameters, and fp32 gradients for them; other parameters are left to `inner`.

    If others wrote to a parameter since its last update (`load_state_dict`, an initialisation, other memory as its
    `data`), its version or address has changed. Its master then takes the new value, unless the value is the rounded
    master itself. Masters start from `exact`, values in full precision by the id of the parameter, or else from the
    parameter.
    """

    def __init__(self, inner: Gradients, exact: Mapping[int, Tensor]) -> None:
        self._inner = inner
        self._low = [number for number, value in enumerate(inner.values) if value.dtype in LOW_PRECISION]
        values = [value.detach().float() if value.dtype in LOW_PRECISION else value for value in inner.values]
        self._gradients = list(values)
        for number in self._low:
            self._gradients[number] = torch.zeros_like(values[number])
        low = [slot.parameter.dtype in LOW_PRECISION for slot in inner.slots]
        masters = zip(inner.slots, by_slot(inner, values), low, strict=True)
        super().__init__([slot._replace(trained=master) if is_low else slot for slot, master, is_low in masters])
        self.values, self.flat, self.memories = values, inner.flat, inner.memories
        self._gradients_by_slot = by_slot(inner, self._gradients)
        self._low_slots = [number for number, is_low in enumerate(low) if is_low]
        with torch.no_grad():
            for number in self._low_slots:
                if (value := exact.get(id(self.slots[number].parameter))) is not None:
                    self.slots[number].trained.copy_(value)
        self._seen: list[tuple[int, int]] | None = None  # not yet: ranks may still receive rank 0's parameters

    def refresh(self, *, thorough: bool = False) -> None:
        now, before = self._versions(), None if thorough else self._seen
        if now == before:
            return
        self._inner.refresh()
        with torch.no_grad():
            for number in self._low_slots:
                slot = self.slots[number]
                written = before is None or before[number] != now[number]
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
        for number in self._low_slots:
            self.slots[number].trained.grad = self._gradients_by_slot[number] if self.received[number] else None

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


def backward(gradients: Gradients, loss: Tensor, start: Tensor | None, *, retain_graph: bool = False) -> None:
    """Add the gradients of `loss`, multiplied by `start`; None for 1."""
    # Held gradients stay where they are: no memory takes them in.
    receiving = [] if gradients.held else [memory for memory in gradients.memories if memory.copies_in_backward]
    for memory in receiving:
        memory.expects_gradients = True
    try:
        run_backward(loss, start, retain_graph=retain_graph)
    finally:
        for memory in receiving:
            memory.expects_gradients = False


def by_slot(gradients: Gradients, tensors: Iterable[Value]) -> list[Value]:
    """Split tensors that are laid out as `gradients.values` into one tensor for each slot."""
    pieces = zip(gradients.flat, tensors, strict=True)
    return [
        view
        for memory, tensor in pieces
        for view in ([tensor] if memory is None or tensor is None else memory.layout.views(tensor))
    ]


class Clipping:
    """Clip the norm of all gradients together, in a few kernel launches.

    If a device has no kernel for many tensors, torch multiplies them one by one. The kernel of loss scaling takes many
    fp32 tensors on every device.

    For one tensor a parameter, all of one dtype, the result is that of torch's `clip_grad_norm_`, to the last bit. In
    flat memory, or with several dtypes, the norm is summed in another order and may differ in its last bit. `flagged`:
    whether the device's kernel for unscaling reads an overflow flag, and skips its work if it is set.
    """

    def __init__(self, max_norm: float, *, flagged: bool) -> None:
        self._max_norm, self._flagged = max_norm, flagged
        self._overflow: Tensor | None = None  # the kernel's overflow result, which is not needed here

    def __call__(self, gradients: list[Tensor], whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Clip gradients in place and return their norm before; `whole` turns this rank's norm into that of all."""
        norm = whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        factor = (self._max_norm / (norm + 1e-6)).clamp_(max=1.0)
        kinds = {(type(gradient), gradient.dtype) for gradient in gradients}
        if not self._flagged and kinds == {(Tensor, torch.float32)}:
            if self._overflow is None:
                self._overflow = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._overflow, factor.float())
        else:
            torch._foreach_mul_(gradients, factor)
        return norm


@torch.no_grad()
def clip_by(function: Callable[[list[Tensor]], object], gradients: Gradients) -> None:
    """Clip by a function of the script, which changes or replaces each `grad`; see `clip` of `TrainerOptions`."""
    gradients.expose()
    slots = zip(gradients.slots, gradients.received, strict=True)
    trained = [slot.trained for slot, received in slots if received]
    before = [tensor.grad for tensor in trained]
    function(list(trained))
    for tensor, gradient in zip(trained, before, strict=True):
        if tensor.grad is not gradient and gradient is not None:
            gradient.copy_(torch.zeros_like(gradient) if tensor.grad is None else tensor.grad)
            tensor.grad = gradient
