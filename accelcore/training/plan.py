"""Making a model and its optimizer ready to be trained: stages, all checked before one is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.roles.compiler import Compiled
from accelcore.training.captured import CapturedStep
from accelcore.training.contexts import Contexts
from accelcore.training.gradients import Gradients, PerTensor
from accelcore.training.observers import Listeners
from accelcore.training.options import TrainerOptions
from accelcore.training.policy import Policy
from accelcore.training.strategies.strategy import Strategy

__all__ = ["Plan", "Stage"]


@dataclass
class Plan:
    """What a training is made of. Each stage reads what earlier ones made, and adds its part.

    Attributes:
        backend, model, optimizer, options: as given.
        policy, contexts: in which precision everything is computed (stage `Cast`).
        strategy: how ranks share the work (`Shard`).
        listeners: which observers are told what (`Observe`).
        gradients: the owner of what is trained (`Flatten`); at first of nothing.
        masters: for each master in the groups of an optimizer of torch's, by its id, its parameter (`Bind`).
        forward: the model to call (`Replicate`, `Compile`).
        compiled: what became of `compile` (`Compile`); None where it was not asked for.
        captured: captures steps (`Capture`); None where that was not asked for.
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
    masters: dict[int, nn.Parameter] = field(default_factory=dict)
    forward: Callable[..., Any] = field(init=False)
    compiled: Compiled | None = None
    captured: CapturedStep | None = None

    def of_model(self, held: Tensor) -> Tensor:
        """The model's parameter for one in the optimizer's groups, which may be its master."""
        return self.masters.get(id(held), held)

    def groups(self) -> list[list[Tensor]]:
        """The parameters in the optimizer's groups, as the model has them."""
        return [[self.of_model(held) for held in group["params"]] for group in self.optimizer.param_groups]


class Stage(Protocol):
    """One thing that is done to a model or its optimizer before they are trained."""

    def check(self, plan: Plan) -> None:
        """Raise for what this stage cannot do; changes neither model nor optimizer."""

    def apply(self, plan: Plan) -> None:
        """Do it. Called again, from some stage on, when what is trained has changed."""
