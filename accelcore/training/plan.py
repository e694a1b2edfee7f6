"""The plan of a training, the contract of the stages that fill it in, and a snapshot of the model that they prepared.

`stages/__init__.py` has their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.errors import TrainingError, logger
from accelcore.precision.policy import Policy
from accelcore.precision.role import Contexts
from accelcore.roles.compiler import Compiled
from accelcore.training.captured import CapturedStep
from accelcore.training.gradients import Gradients, PerTensor
from accelcore.training.observers import Listeners
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import Strategy

# Compared in every window, for every parameter: without a Python frame for each.
_TRAINABLE, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")


@dataclass
class Plan:
    """The objects that a training is made of. Each stage adds its own, in `apply` or already in `check`.

    All checks run before the first `apply`. So the `apply` of `Place` may use the strategy, which `Shard.check` made.
    """

    backend: Backend
    model: nn.Module  # as given
    optimizer: Optimizer  # as given
    options: TrainerOptions  # as given, with defaults
    policy: Policy = field(init=False)  # the precision of the whole training (stage `Cast`)
    contexts: Contexts = field(init=False)  # the policy's autocast and arithmetic (`Cast`)
    strategy: Strategy = field(init=False)  # the parallel strategy (`Shard`)
    listeners: Listeners = field(init=False)  # the observers of each event (`Observe`)
    # the gradients of the trained parameters (`Bind`)
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


class ModelSnapshot:
    """The model's parameters and the optimizer's groups, as they were when the trainer was prepared.

    `rest` frees parameters that the strategy has gathered; the model then has the trained parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rest: Callable[[], None]) -> None:
        self._model, self._optimizer, self._rest = model, optimizer, rest
        self._training, self._warned = True, False
        self._members = [list(group["params"]) for group in optimizer.param_groups]  # alive, so that ids stay theirs
        self._groups = self._groups_now()
        self._by_name = dict(model.named_parameters())
        self._parameters = list(self._by_name.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def check_known(self, *, warns: bool = False) -> None:
        """Raise TrainingError for a change of the known parameters or the optimizer's groups.

        If it `warns`, log once that the model is in evaluation mode.
        """
        if warns and self._model.training is not self._training and is_grad_enabled():  # else backward raises
            self._training = self._model.training
            if not self._training and not self._warned:
                self._warned = True
                logger.warning(
                    "the model is trained in evaluation mode, without dropout, and with frozen BatchNorm statistics. "
                    "Call model.train() after loading a pretrained model, and after an evaluation of your own. If this "
                    "is on purpose, call eval() of the parts that are meant, such as of each BatchNorm"
                )
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            raise TrainingError(
                "the model was cast after its trainer was made",
                remedy="cast it before, or set precision=Policy(model_dtype=...)",
            )
        # Kernels walk a parameter, its master and its state side by side; `weight.data.t()` keeps the address.
        if list(map(Tensor.stride, self._parameters)) != self._strides:
            raise self._changed()
        if list(map(_TRAINABLE, self._parameters)) != self._trainable or self._groups_now() != self._groups:
            raise self._changed()

    def check_model(self) -> None:
        """Do what `check_known` does, and walk the whole model for new parameters."""
        self.check_refreshable()
        self.check_known()
        # A frozen parameter, too, has to be moved to the device, and to be the same on all ranks.
        if any(name not in self._by_name for name, _ in self._model.named_parameters()):
            raise self._changed()

    def check_refreshable(self) -> None:
        """Raise TrainingError for changes that `Trainer.refresh` cannot follow: replaced or unknown parameters."""
        self._rest()
        now = dict(self._model.named_parameters())
        gone = [name for name, parameter in self._by_name.items() if now.get(name) is not parameter]
        known = {id(held) for group in self._optimizer.param_groups for held in group["params"]}
        known |= set(map(id, self._by_name.values()))
        strange = [name for name, parameter in now.items() if id(parameter) not in known and parameter.requires_grad]
        if gone or strange:
            what = f"{gone[0]!r} was removed or replaced" if gone else f"{strange[0]!r} is new, and in no group"
            raise TrainingError(
                f"the model's parameters have changed since its trainer was made: {what}",
                remedy="make optimizer and trainer again. A parameter that was only added can be given to "
                "optimizer.add_param_group, or frozen by requires_grad_(False); then call trainer.refresh()",
            )

    def _groups_now(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _changed(self) -> TrainingError:
        said = []
        known = zip(self._by_name.items(), self._trainable, self._strides, strict=True)
        for (name, parameter), trainable, strides in known:
            if parameter.requires_grad != trainable:
                said.append(f"{name!r} was {'frozen' if trainable else 'unfrozen'}")
            if parameter.stride() != strides:
                said.append(f"{name!r} has another memory layout")
        said += [f"{name!r} is new" for name, _ in self._model.named_parameters() if name not in self._by_name]
        if self._groups_now() != self._groups:
            said.append("the optimizer has other parameters in its groups")
        changes = ", ".join(said[:3]) + (f", and {len(said) - 3} more" if len(said) > 3 else "")
        return TrainingError(
            f"the model or the optimizer has changed since its trainer was made: {changes}",
            remedy="call trainer.refresh() after a change: between two windows, and on all ranks of a job",
        )
