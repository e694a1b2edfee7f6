"""zero1: the gradients of combine_ddp, and an update that the ranks divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.errors import UnsupportedError
from accelcore.optim.flat.memory import Slot
from accelcore.precision.policy import Policy
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import CombineDDP, broadcast_tensors, owns

_GLOBAL_NORMS = {"use_global_grad_norm": "use_global_grad_norm=False", "max_grad_norm": "max_grad_norm=-1"}
"""Options by which an optimizer clips by a norm over several gradients, and how to turn each off."""


class Zero1(CombineDDP):
    """Every rank has all gradients, clipped and checked as under combine_ddp; the owner of a parameter updates it.

    Each parameter has one owner, so that an optimizer sees whole parameters. The owners divide the slots, in their
    order, into parts of nearly as many elements. A parameter keeps its owner, which has its state. Gradients are hidden
    on the other ranks, so that no optimizer makes state there; then the owner broadcasts the updated parameter.
    """

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self.owners: dict[str, int] = {}

    def check(self, model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:
        for option, remedy in _GLOBAL_NORMS.items():
            if any((group.get(option) or 0) > 0 for group in optimizer.param_groups):
                raise UnsupportedError(
                    f"{getattr(optimizer, 'name', type(optimizer).__name__)} cannot clip by {option} under "
                    'parallel="zero1"',
                    remedy=f"set {remedy}, and give clip_norm=... to the trainer, which clips before",
                )

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
        trained = [slot.name for slot in gradients.slots]
        frozen = sorted(elements.keys() - set(trained))  # they may have optimizer state, and may be trained later
        for names in (trained, frozen):
            new = {name: elements[name] for name in names if name not in self.owners}
            self.owners.update(_divided(new, self.collectives.world_size))
        return super().replicate(model, gradients)

    def update(self, gradients: Gradients, optimize: Callable[[], None]) -> None:
        received = [slot for slot, has_one in zip(gradients.slots, gradients.received, strict=True) if has_one]
        with _hidden(gradients, [slot for slot in gradients.slots if not owns(self, slot.name)]):
            optimize()
        for rank in range(self.collectives.world_size):
            updated: list[Tensor] = [slot.trained for slot in received if self.owners[slot.name] == rank]
            broadcast_tensors(self.collectives, updated, src=rank)


@contextmanager
def _hidden(gradients: Gradients, slots: Sequence[Slot]) -> Iterator[None]:
    """Hide the gradients of these slots, so that an optimizer leaves their parameters and state as they are."""
    hidden, before = {id(slot.parameter) for slot in slots}, [slot.trained.grad for slot in slots]
    received = [(memory, memory.received) for memory in gradients.memories]
    for slot in slots:
        slot.trained.grad = None
    for memory, flags in received:
        memory.received = [had and id(p) not in hidden for p, had in zip(memory.parameters, flags, strict=True)]
    try:
        yield
    finally:
        for slot, gradient in zip(slots, before, strict=True):
            slot.trained.grad = gradient
        for memory, flags in received:
            memory.received = flags


def _divided(elements: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the owner of each parameter, by name: the rank whose part of all elements contains its middle."""
    total, before, owners = sum(elements.values()), 0, {}
    for name, count in elements.items():
        middle = before + count / 2
        owners[name] = min(int(world_size * middle / max(total, 1)), world_size - 1)
        before += count
    return owners
