"""Contract of a parallel strategy; the strategies of one process, of combine_ddp and of zero1; and their exchanges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.devices import Roles
from accelcore.errors import ConfigurationError, DistributedError, UnsupportedError
from accelcore.jobs.collectives import Collectives
from accelcore.jobs.launchers import read_launch
from accelcore.optim.flat.memory import Slot
from accelcore.precision.policy import Policy
from accelcore.torch_internals import flatten, unflatten
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.util.containers import bytes_of

_OWNS_ALL = nullcontext()  # made once: each step enters it
_COMM_DTYPES = ("float32", "bfloat16", "float16")

_GLOBAL_NORMS = {"use_global_grad_norm": "use_global_grad_norm=False", "max_grad_norm": "max_grad_norm=-1"}
"""Options by which an optimizer clips by a norm over several gradients, and how to turn each off."""


class Strategy(ABC):
    """One way to train one model on several ranks.

    All ranks make the same calls in the same order. A strategy is made once for a trainer; `trainer.refresh()` calls
    `check`, `shard` and `replicate` again.
    """

    is_sharded = False  # whether the model is divided among the ranks
    uses_buckets = False  # whether torch exchanges the gradients of backward itself, so that they cannot lie flat
    divisor: int = 1  # what backward divides gradients by, so that their sum over ranks is their mean
    # the rank that updates each parameter, by name, and has its optimizer state; None: every rank updates all
    owners: Mapping[str, int] | None = None

    def __init__(self, backend: Roles, options: TrainerOptions) -> None:
        self.collectives, self.device = backend.collectives, backend.device

    def check(self, model: nn.Module, optimizer: Optimizer, policy: Policy) -> None:  # most take any
        """Raise an error for a model or optimizer that this strategy cannot train; changes nothing."""

    def shard(self, model: nn.Module, policy: Policy) -> None:  # most leave the model whole
        """Divide rank 0's model among the ranks, before the optimizer is bound.

        Shards replace the parameters. They are on the device, in fp32 if the policy has masters.
        """

    @abstractmethod
    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        """Give all ranks rank 0's parameters and buffers; return the model to call."""

    def leaves(self, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that autograd computes the gradients of the trained parameters for."""
        return parameters

    def before_forward(self, last: bool) -> None:
        """Prepare for a micro-batch, before its forward pass; `last`: the last of its window."""

    def before_backward(self) -> None:
        """Prepare for a backward pass. Raise TrainingError if the gradients would stay on this rank."""

    def after_backward(self) -> None:
        """Complete the exchange of gradients that torch started in backward."""

    @abstractmethod
    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        """Make the gradients of a window their mean over ranks; `full`: the window has all of its micro-batches.

        A parameter without a gradient on this rank has one afterwards if another rank had one.
        """

    def agree(self, found: Tensor) -> Tensor:
        """Return 1.0 if any rank found an overflow. Sums of gradients over ranks have it on every rank already."""
        return found

    def norm(self, local: Tensor) -> Tensor:
        """Return the 2-norm of all gradients, given the norm of the gradients on this rank."""
        return local

    def updating(self, gradients: Gradients) -> AbstractContextManager[None]:
        """Return a context in which this rank updates the parameters that it owns; at its end it has those of all."""
        return _OWNS_ALL

    def reset(self) -> None:
        """Return to the state between two steps, also after a step that failed; free gathered parameters."""


class SingleProcess(Strategy):
    """Strategy of a job of one process, for every value of `parallel`."""

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        return model

    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        pass


class CombineDDP(Strategy):
    """One all_reduce for each dtype after the last backward pass of a window (as `combine_ddp` of Ascend's apex).

    It needs neither buckets nor hooks in backward, and does not overlap computation and communication. A parameter that
    a rank did not use costs nothing: a flag for each parameter travels with the gradients.
    """

    def __init__(self, backend: Roles, options: TrainerOptions) -> None:
        super().__init__(backend, options)
        self.divisor = backend.collectives.world_size
        self._comm_dtype = comm_dtype(options)

    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        broadcast_tensors(self.collectives, [*model.parameters(), *model.buffers()])
        return model

    def reduce(self, gradients: Gradients, *, full: bool) -> None:
        all_reduce_gradients(self.collectives, gradients, dtype=self._comm_dtype)


class Zero1(CombineDDP):
    """Every rank has all gradients, clipped and checked as under combine_ddp; the owner of a parameter updates it.

    Each parameter has one owner, so that an optimizer sees whole parameters. The owners divide the slots, in their
    order, into parts of nearly as many elements. A parameter keeps its owner, which has its state. Gradients are hidden
    on the other ranks, so that no optimizer makes state there; then the owner broadcasts the updated parameter.
    """

    def __init__(self, backend: Roles, options: TrainerOptions) -> None:
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

    @contextmanager
    def updating(self, gradients: Gradients) -> Iterator[None]:
        received = [slot for slot, has_one in zip(gradients.slots, gradients.received, strict=True) if has_one]
        with _hidden(gradients, [slot for slot in gradients.slots if not owns(self, slot.name)]):
            yield
        for rank in range(self.collectives.world_size):
            updated: list[Tensor] = [slot.trained for slot in received if self.owners[slot.name] == rank]
            broadcast_tensors(self.collectives, updated, src=rank)


def check_no_launcher(remedy: str) -> None:
    """Raise DistributedError if a launcher started this process as one of several ranks, which have not met."""
    launch = read_launch()
    if launch is not None and launch.world_size > 1:
        raise DistributedError(
            f"a launcher started {launch.world_size} ranks, and they have not met",
            why="each would train its own model, on all the data, and overwrite the others' checkpoints",
            remedy=remedy,
        )


def comm_dtype(options: TrainerOptions) -> torch.dtype | None:
    """Return the dtype to exchange gradients in; None: their own."""
    name = options["comm_dtype"]
    if name is not None and name not in _COMM_DTYPES:
        raise ConfigurationError(f"comm_dtype={name!r} is not supported", available=", ".join(_COMM_DTYPES))
    return None if name is None else getattr(torch, name)


def owns(strategy: Strategy, name: str) -> bool:
    """Whether this rank updates a parameter, and has its optimizer state."""
    return strategy.owners is None or strategy.owners[name] == strategy.collectives.rank


def all_reduce_gradients(
    collectives: Collectives, gradients: Gradients, *, divisor: int = 1, dtype: torch.dtype | None = None
) -> None:
    """Divide gradients by `divisor`, and sum them over ranks, in `dtype`; None: in their own."""

    def mean(packed: Tensor) -> None:
        packed = torch.view_as_real(packed) if packed.is_complex() else packed  # `dtype` is a real one
        if divisor != 1:
            packed /= divisor  # before they are summed: the sum of many ranks may overflow in low precision
        if dtype is None or dtype == packed.dtype:
            collectives.all_reduce(packed)
        else:
            packed.copy_(collectives.all_reduce(packed.to(dtype)))

    gradients.reduce(mean)


def broadcast_masters(strategy: Strategy, gradients: Gradients) -> None:
    """Give all ranks the fp32 masters of rank 0, after its parameters; masters of shards stay."""
    gradients.refresh()
    if strategy.collectives.world_size > 1 and not strategy.is_sharded:
        masters = [slot.trained for slot in gradients.slots if slot.trained is not slot.parameter]
        broadcast_tensors(strategy.collectives, masters)


@torch.no_grad()
def broadcast_tensors(collectives: Collectives, tensors: list[Tensor], *, src: int = 0) -> None:
    """Give all ranks these tensors of rank `src`: one message of bytes for each dtype, as groups do not take all."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault(tensor.dtype, []).append(tensor)
    sends = collectives.rank == src
    for members in alike.values():
        packed = flatten(members) if sends else members[0].new_empty(sum(member.numel() for member in members))
        received = collectives.broadcast(bytes_of(packed), src)
        if not sends:
            torch._foreach_copy_(members, unflatten(received.view(packed.dtype), members))


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
