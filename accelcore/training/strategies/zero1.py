"""zero1: as combine_ddp, but each rank has the optimizer's state of its part of the parameters, and updates those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.errors import UnsupportedError
from accelcore.optim.runs import Slot
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.strategies.combine import CombineDDP
from accelcore.training.strategies.exchanging import broadcast
from accelcore.training.strategies.strategy import Strategy

__all__ = ["Zero1"]

_OF_ALL = {"use_global_grad_norm": "use_global_grad_norm=False", "max_grad_norm": "max_grad_norm=-1"}
"""Options by which an optimizer clips by a norm of many gradients, and how to say that it is not to."""


class Zero1(CombineDDP):
    """Every rank has all gradients, clipped and checked like those of combine_ddp; whoever owns a parameter updates it.

    A parameter is owned as a whole, so that an optimizer may look at each as a whole. Owners are stretches of nearly as
    many elements in the order of the slots; a parameter keeps its owner, which has its state. The others see no
    gradient of it, so that no optimizer makes them a state, and are sent what became of it.
    """

    divides_updates = True

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self._owners: dict[str, int] = {}

    def check_optimizer(self, optimizer: Optimizer) -> None:
        for option, remedy in _OF_ALL.items():
            if any((group.get(option) or 0) > 0 for group in optimizer.param_groups):
                raise UnsupportedError(
                    f'{getattr(optimizer, "name", type(optimizer).__name__)} with {option} and parallel="zero1"',
                    why="it clips by the norm of many gradients, and is given those of this rank's parameters",
                    remedy=f"say {remedy}, and clip_norm=... to the trainer, which clips before",
                )

    def take_over(self, before: Strategy) -> None:
        if isinstance(before, Zero1):
            self._owners = before._owners

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
        trained = [slot.name for slot in gradients.slots]
        frozen = sorted(elements.keys() - set(trained))  # which may have a state, too, or be trained later
        for names in (trained, frozen):
            new = {name: elements[name] for name in names if name not in self._owners}
            self._owners.update(_divided(new, self.collectives.world_size))
        return super().replicate(model, gradients)

    def owns(self, name: str) -> bool:
        return self._owners[name] == self.collectives.rank

    def update(self, gradients: Gradients, step: Callable[[], None]) -> None:
        received = [slot for slot, has_one in zip(gradients.slots, gradients.received, strict=True) if has_one]
        with _hidden(gradients, [slot for slot in gradients.slots if not self.owns(slot.name)]):
            step()
        for rank in range(self.collectives.world_size):
            updated: list[Tensor] = [slot.trained for slot in received if self._owners[slot.name] == rank]
            broadcast(self.collectives, updated, src=rank)


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
    """The owner of each parameter, by name: the rank in whose stretch of all elements its middle lies."""
    total, before, owners = sum(elements.values()), 0, {}
    for name, count in elements.items():
        middle = before + count / 2
        owners[name] = min(int(world_size * middle / max(total, 1)), world_size - 1)
        before += count
    return owners
