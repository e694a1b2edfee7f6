"""The plan of a training, which the stages fill in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.precision.policy import Policy
from accelcore.roles.compiler import Compiled
from accelcore.training.captured import CapturedStep
from accelcore.training.gradients import Gradients, PerTensor
from accelcore.training.observers import Listeners
from accelcore.training.options import TrainerOptions
from accelcore.training.parallel.strategy import Strategy

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["Contexts", "Plan", "Stage"]

Context = AbstractContextManager[object]


class Contexts:
    """Precision contexts of a training run.

    Attributes:
        make_region: returns a new context for a forward pass and its loss.
        region: such a context that can be entered repeatedly, which is cheaper than a new one.
        arithmetic: the reusable context of a backward pass and of an update.
    """

    # No attribute refers to the trainer: a reference cycle would keep the device's memory until garbage collection.
    def __init__(self, backend: Backend, policy: Policy, fp32: str | None) -> None:
        dtype = getattr(torch, policy.autocast) if policy.autocast else None
        self.make_region: Callable[[], Context] = (
            nullcontext if dtype is None else partial(backend.precision.autocast, dtype, table=policy.table)
        )
        self.region = self.make_region()
        self.arithmetic: Context = nullcontext()
        if fp32 is not None:
            backend.precision.fp32(fp32)  # raises here what the first step would raise
            self.arithmetic = _Reentrant(partial(backend.precision.fp32, fp32))
            self.make_region = partial(_both, self.arithmetic, self.make_region)
            self.region = _Reentrant(self.make_region)


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


class _Reentrant:
    """Reusable context that creates a one-time context on each entry."""

    def __init__(self, make: Callable[[], Context]) -> None:
        self._make = make
        self._entered: list[Context] = []

    def __enter__(self) -> object:
        self._entered.append(self._make())
        return self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


@contextmanager
def _both(outer: Context, make_inner: Callable[[], Context]) -> Iterator[None]:
    with outer, make_inner():
        yield
