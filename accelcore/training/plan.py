"""The plan of a training, and the contract of the stages that fill it in.

`stages/__init__.py` has their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.devices import Roles
from accelcore.errors import Once
from accelcore.precision.policy import Policy, choose_policy, skipping
from accelcore.precision.role import Contexts
from accelcore.roles.compiler import Compiled
from accelcore.training.captured import CapturedStep
from accelcore.training.gradients import Gradients, PerTensor
from accelcore.training.observers import Listeners
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel import create_strategy
from accelcore.training.parallel.strategy import Strategy


@dataclass
class Plan:
    """The objects that a training is made of: those that `decide` makes, and those that the stages add in `apply`."""

    backend: Roles
    model: nn.Module  # as given
    optimizer: Optimizer  # as given
    options: TrainerOptions  # as given, with defaults
    log: Once  # warnings of this trainer
    policy: Policy = field(init=False)  # the precision of the whole training
    contexts: Contexts = field(init=False)  # the policy's autocast and arithmetic
    strategy: Strategy = field(init=False)  # the parallel strategy
    listeners: Listeners = field(init=False)  # the observers of each event
    # the gradients of the trained parameters (stage `Bind`)
    gradients: Gradients = field(default_factory=lambda: PerTensor([]))
    # values of trainable parameters before `Cast` rounded them, by the parameter's id; empty after `Bind`
    exact: dict[int, Tensor] = field(default_factory=dict)
    # for each fp32 master in the groups of a torch optimizer, by its id, the model's parameter (`Bind`)
    masters: dict[int, nn.Parameter] = field(default_factory=dict)
    # From a resume to the first step: parameters that only one of the two runs trained, and whether the saved run did.
    otherwise_trained: dict[str, bool] | None = None
    forward: Callable[..., Any] = field(init=False)  # the model to call (`Replicate`, `Compile`)
    compiled: Compiled | None = None  # the compiled model; None if `compile` was not asked for
    captured: CapturedStep | None = None  # captures steps; None if `graph=True` was not asked for

    def decide(self) -> None:
        """Make what the options alone decide, once, before the checks of the stages: precision, strategy, listeners."""
        options = self.options
        policy = choose_policy(options["precision"], options["loss_scale"])
        self.policy = skipping(policy) if options["on_nonfinite"] == "skip" else policy
        self.contexts = Contexts(self.backend.precision, self.policy, options["fp32"])
        self.strategy = create_strategy(self.backend, options)
        self.listeners = Listeners(options["observers"])

    def of_model(self, held: Tensor) -> Tensor:
        """Return the model's parameter for a tensor in the optimizer's groups, which may be its fp32 master."""
        return self.masters.get(id(held), held)

    def groups(self) -> list[list[Tensor]]:
        """Return the model's parameters of each optimizer group."""
        return [[self.of_model(held) for held in group["params"]] for group in self.optimizer.param_groups]


class Stage(ABC):
    """One change of the model or the optimizer before the training. All stages are checked before one is applied."""

    def check(self, plan: Plan) -> None:  # some make changes that are always possible
        """Raise an error if this stage is impossible. Changes neither model nor optimizer."""

    @abstractmethod
    def apply(self, plan: Plan) -> None:
        """Make the change. `Trainer.refresh` calls it again."""
