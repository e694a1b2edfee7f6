"""What a training step asks of a way to train one model on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.training.gradients import Gradients
from accelcore.training.options import TrainerOptions
from accelcore.training.policy import Policy

__all__ = ["Strategy"]


class Strategy(ABC):
    """One way to train one model on several ranks.

    All ranks make the same calls in the same order. Whatever `reduce` leaves is the mean over ranks.

    Args:
        backend: where to train; it knows the job.
        options: the trainer's.

    Attributes:
        collectives: the job's.
    """

    prefers_flat: bool | None = None
    """Whether gradients should lie in one piece of memory: True where it packs them anyhow, False where torch keeps
    them in buckets of its own, None where it does not matter."""

    divisor: int = 1
    """What backward divides gradients by, so that their sum over ranks is their mean."""

    shards: bool = False
    """Whether the model is divided among the ranks."""

    divides_updates: bool = False
    """Whether each rank updates only a part of what is trained (`owns`)."""

    exchanges_in_backward: bool = False
    """Whether gradients travel while a backward pass runs."""

    def __init__(self, backend: Backend, options: TrainerOptions) -> None:
        self.collectives = backend.collectives

    def check(self, model: nn.Module, policy: Policy) -> None:  # noqa: B027  # most can train any model
        """Raise ConfigurationError for what this strategy cannot train; changes nothing."""

    def take_over(self, before: Strategy) -> None:  # noqa: B027  # most have nothing that lasts
        """Take the place of the strategy `before`, under which other parameters were trained."""

    def check_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027  # most can step any
        """Raise UnsupportedError for an optimizer that this strategy cannot step; changes nothing."""

    def shard(self, model: nn.Module, policy: Policy) -> None:  # noqa: B027  # most leave it whole
        """Divide the model among the ranks, where this strategy does so (`shards`): as it is on rank 0.

        Parameters are replaced by their shards, which are on the device, and exact where the policy has masters.
        """

    def sharded(self, model: nn.Module) -> Mapping[str, Tensor]:
        """The parameters that are divided among the ranks, under all names that they have."""
        return {}

    def rest(self) -> None:  # noqa: B027
        """Between two steps: put the parameters that are trained back into the model, and free what was gathered."""

    @abstractmethod
    def replicate(self, model: nn.Module, gradients: Gradients) -> Callable[..., Any]:
        """What to call in place of `model`, with parameters and buffers of rank 0 on all ranks."""

    def micro(self, last: bool) -> None:  # noqa: B027  # most have nothing to do
        """A micro-batch begins, the window's last or not, before its forward pass."""

    def before_backward(self) -> None:  # noqa: B027
        """Raise TrainingError where these gradients would stay on this rank."""

    def exchange(self, *, last: bool) -> None:  # noqa: B027
        """After a backward pass, the `last` of a window or not: exchange what was not exchanged meanwhile."""

    def abandon(self) -> None:  # noqa: B027
        """A step failed: be ready for the next window."""

    @abstractmethod
    def reduce(self, gradients: Gradients, *, exchanged: bool) -> None:
        """Make the gradients of a window their mean over ranks; `exchanged`: the window was full, and `exchange` ran.

        A parameter without a gradient on this rank has one afterwards where another rank had one.
        """

    def owns(self, name: str) -> bool:
        """Whether this rank has the optimizer's state of a slot. Each slot has an owner; most strategies, all ranks."""
        return True

    def update(self, gradients: Gradients, step: Callable[[], None]) -> None:
        """Have all that is trained updated, on all ranks; `step` does so for what this rank owns."""
        step()

    @abstractmethod
    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over ranks, in place."""

    def norm(self, local: Tensor) -> Tensor:
        """The 2-norm of all gradients, from that of those this rank has."""
        return local

    def agree(self, found: Tensor) -> Tensor:
        """1.0 where any rank found an overflow. Gradients that are summed over ranks carry it to all of them."""
        return found

    @abstractmethod
    def sync_buffers(self) -> None:
        """A window was closed: give all ranks the buffers of rank 0."""
