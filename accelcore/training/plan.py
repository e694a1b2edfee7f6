"""The plan of a training, the stages that fill it in, and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.errors import DistributedError
from accelcore.precision.policy import Policy
from accelcore.roles.compiler import Compiled
from accelcore.training.agreement import Agreement, describe
from accelcore.training.captured import CapturedStep
from accelcore.training.gradients import Gradients, PerTensor
from accelcore.training.observers import Listeners
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import Strategy
from accelcore.training.stages.execution import Capture, Compile, Observe
from accelcore.training.stages.model import Cast, Contexts, Place
from accelcore.training.stages.parameters import Bind, Replicate, Shard
from accelcore.training.stages.recompute import ActivationCheckpointing

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Plan", "Preparation", "Stage"]


@dataclass
class Plan:
    """The objects that a training is made of. Each stage adds its own, some already in its `check`: `Shard` makes the
    strategy there, which `Place` and `Cast` read when they are applied.

    Attributes:
        backend, model, optimizer, options: as given.
        policy, contexts: the precision of every computation (stage `Cast`).
        strategy: the parallel strategy (`Shard`).
        listeners: the observers of each event (`Observe`).
        gradients: the gradients of the trained parameters (`Bind`).
        exact: values of trainable parameters before `Cast` rounded them, by the parameter's id; empty after `Bind`.
        masters: for each fp32 master in the groups of a torch optimizer, by its id, the model's parameter (`Bind`).
        forward: the model to call (`Replicate`, `Compile`).
        compiled: the compiled model; None if `compile` was not asked for.
        captured: captures steps; None if `graph=True` was not asked for.
    """

    backend: Backend
    model: nn.Module
    optimizer: Optimizer
    options: TrainerOptions
    policy: Policy = field(init=False)
    contexts: Contexts = field(init=False)
    strategy: Strategy = field(init=False)
    listeners: Listeners = field(init=False)
    gradients: Gradients = field(default_factory=lambda: PerTensor([]))
    exact: dict[int, Tensor] = field(default_factory=dict)
    masters: dict[int, nn.Parameter] = field(default_factory=dict)
    forward: Callable[..., Any] = field(init=False)
    compiled: Compiled | None = None
    captured: CapturedStep | None = None

    def of_model(self, held: Tensor) -> Tensor:
        """Return the model's parameter for a tensor in the optimizer's groups, which may be its fp32 master."""
        return self.masters.get(id(held), held)

    def groups(self) -> list[list[Tensor]]:
        """Return the model's parameters of each optimizer group."""
        return [[self.of_model(held) for held in group["params"]] for group in self.optimizer.param_groups]


class Stage(Protocol):
    """One change of the model or the optimizer before the training. All stages are checked before one is applied."""

    def check(self, plan: Plan) -> None:
        """Raise an error if this stage is impossible. Changes neither model nor optimizer."""

    def apply(self, plan: Plan) -> None:
        """Make the change. `Trainer.refresh` calls it again."""


_ORDER = (Place, ActivationCheckpointing, Cast, Shard, Bind, Replicate, Observe, Compile, Capture)


class Preparation:
    """Take a plan through all stages: first every check, so that an error leaves model and optimizer unchanged.

    The ranks of a job do this together, and compare what they are about to train.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stages: Sequence[Stage] = [stage() for stage in _ORDER]

    def check(self, what: str, first: Callable[[], None] = lambda: None) -> None:
        """Run `first` and every check, on all ranks together; `what` is the script's call, for errors."""
        job = self._plan.backend.collectives
        agreement = Agreement(job, self._plan.backend.device)
        agreement.meet(what)
        with agreement.together("prepare this training", DistributedError):
            first()
            for stage in self._stages:
                stage.check(self._plan)
        if job.world_size > 1:
            agreement.train_alike(describe(self._plan))

    def repeat(self, first: Callable[[], None], give_up: Callable[[str, str, BaseException], None]) -> None:
        """Check and apply every stage again; `give_up` is called if this fails when another rank may have done it."""
        may_differ = self._plan.backend.collectives.world_size > 1  # another rank may have passed a check that failed
        try:
            self.check("trainer.refresh()", first)
            may_differ = True
            self.apply()
        except BaseException as error:
            if may_differ:
                give_up(
                    "trainer.refresh() failed, and its changes may be incomplete or differ between ranks",
                    "make the same change on all ranks before it; start the job again, from a checkpoint",
                    error,
                )
            raise

    def apply(self) -> None:
        """Apply every stage."""
        for stage in self._stages:
            stage.apply(self._plan)
