"""Gradients of one optimizer's parameters, accumulated over backward passes until its step.

After each backward pass they are exchanged, unscaled, and added to the gradients of earlier passes, in fp32 masters if
there are any. So a step may follow several losses, each with its own scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.apex.levels import Properties
from accelcore.apex.state import AmpScaler
from accelcore.backend import Backend
from accelcore.errors import AmpError
from accelcore.optim.flat.memory import Slot
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.training.gradients import first_not_finite
from accelcore.training.options import complete
from accelcore.training.parallel.strategy import (
    SingleProcess,
    all_reduce_gradients,
    any_overflow,
    broadcast_buffers,
)
from accelcore.training.plan import Plan
from accelcore.training.stages.flatten import Bind, Flatten
from accelcore.training.stages.shard import create_strategy

__all__ = ["Accumulated"]


class Accumulated:
    """Parameters of an optimizer, and the gradients for its next step.

    Attributes:
        has_masters: whether some parameters have fp32 masters.

    Raises:
        AccelError: the optimizer cannot be used so; nothing has changed.
    """

    has_masters: bool

    def __init__(
        self, backend: Backend, models: Sequence[nn.Module], optimizer: Optimizer, properties: Properties
    ) -> None:
        self._exchanges = properties.combine_ddp
        options = complete(
            {"flat": properties.combine_grad or None, "parallel": "combine_ddp" if self._exchanges else None}
        )
        self._models, self._optimizer = models, optimizer
        self._plan = plan = Plan(backend, nn.Module(), optimizer, options)
        plan.policy = properties.policy
        plan.strategy = create_strategy(backend, options) if self._exchanges else SingleProcess(backend, options)
        self._stages = (Flatten(), Bind())
        self._scaled_by: tuple[AmpScaler, int] | None = None  # the scale that a delayed pass has left
        self._before: list[Tensor | None] = []  # gradients of earlier passes, by slot
        self._exposed: list[Tensor | None] = []
        self._check()

    @property
    def slots(self) -> Sequence[Slot]:
        """The trained parameters, each with its master."""
        return self._plan.gradients.slots

    @property
    def masters(self) -> list[Tensor]:
        """The tensors that the optimizer updates, in the order of its groups: fp32 masters, or the parameters."""
        self._plan.gradients.refresh()
        trained = {id(slot.parameter): slot.trained for slot in self.slots}
        return [trained.get(id(member), member) for member in self._members()]

    @property
    def are_none(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(slot.trained.grad is None for slot in self.slots)

    def bind(self) -> None:
        """Bind the optimizer to its present parameters; if ranks exchange gradients, with rank 0's values."""
        plan = self._plan
        for stage in self._stages:
            stage.apply(plan)
        if self._exchanges:
            plan.strategy.replicate(plan.model, plan.gradients)
            plan.gradients.refresh()
        runs = self._optimizer.bound if isinstance(self._optimizer, RoutedOptimizer) else None
        self._is_flat = bool(plan.options["flat"]) or any(run.memory is not None for run in runs or ())
        self.has_masters = any(slot.trained is not slot.parameter for slot in self.slots)
        self._seen = self._look()

    def begin(self, scaler: AmpScaler) -> None:
        """Begin a backward pass of a loss that this scaler has scaled.

        Raises:
            AmpError: gradients have the scale of another scaler, or an earlier scale.
        """
        if self._scaled_by is not None:
            if self._scaled_by != (scaler, scaler.passes):
                raise AmpError(
                    "gradients that delay_unscale=True left scaled would be unscaled by another scale",
                    why="the pass after it has another loss_id, or the scale has moved between them",
                    remedy="give both the same loss_id and optimizers, or leave delay_unscale out",
                )
            return
        held = {id(slot.parameter): slot.trained.grad for slot in self.slots}
        if self._look() != self._seen:
            self._check()
            self.bind()
        before = [held.get(id(slot.parameter)) for slot in self.slots]
        # This pass will write to the memory of flat gradients and of masters' gradients.
        reused = self._is_flat or self.has_masters
        self._before = [each.clone() if each is not None and reused else each for each in before]
        self._clear()

    def delay(self, scaler: AmpScaler) -> None:
        """End a backward pass, and leave its gradients scaled."""
        self._scaled_by = (scaler, scaler.passes)

    def end(self, scaler: AmpScaler) -> None:
        """End a backward pass: exchange its gradients, unscale them, add the gradients of earlier passes."""
        gradients, strategy = self._plan.gradients, self._plan.strategy
        for slot, before in zip(self.slots, self._before, strict=True):
            if before is not None and slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
        gradients.collect()
        if strategy.divisor > 1 and getattr(self._optimizer, "combine_ddp", True):
            all_reduce_gradients(self._plan.backend.collectives, gradients, divisor=strategy.divisor)
        gradients.grads_to_masters()
        scaler.unscale(self._optimizer, gradients.buffers(), partial(any_overflow, strategy))
        self._expose()
        self._add(self._before)
        self._before, self._scaled_by = [], None

    def check_complete(self) -> None:
        """Raise AmpError if the gradients are still scaled, or masters have not received theirs."""
        if self._scaled_by is not None:
            raise AmpError(
                "step() after a backward pass with delay_unscale=True: the gradients are still scaled",
                remedy="leave delay_unscale out of the last `with amp.scale_loss(...)` before step()",
            )
        missed = (slot.trained.grad is None and slot.parameter.grad is not None for slot in self.slots)
        if not self._exposed and any(missed):
            raise AmpError(
                "parameters have gradients, but their fp32 masters have none",
                why="a backward pass ran outside of `with amp.scale_loss(...)`, which gives masters their gradients",
                remedy="call backward inside of it, even if no scale is needed",
            )

    def take_replaced(self) -> None:
        """Copy gradients into flat memory if the script has replaced them by others."""
        now = [slot.trained.grad for slot in self.slots]
        if not self._is_flat or all(a is b for a, b in zip(now, self._exposed or [None] * len(now), strict=True)):
            return
        wanted = [None if gradient is None else gradient.clone() for gradient in now]
        for slot, gradient in zip(self.slots, wanted, strict=True):
            slot.parameter.grad = None if gradient is None else torch.zeros_like(slot.parameter)
        self._plan.gradients.collect()
        self._plan.gradients.grads_to_masters()
        self._expose()
        self._add(wanted)

    def buffers(self) -> list[Tensor]:
        """Return all unscaled gradients, one tensor for each piece of memory."""
        self.take_replaced()
        return self._plan.gradients.buffers()

    def first_not_finite(self) -> str | None:
        """Return the name of the first parameter whose gradient has an inf or NaN. Waits for the device."""
        return first_not_finite(self._plan.gradients)

    def updated(self) -> None:
        """After a step: give parameters their masters' values, and all ranks the same buffers."""
        self._plan.gradients.masters_to_params()
        if self._exchanges:
            broadcast_buffers(self._plan.backend.collectives, self._plan.model)

    def drop(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, also of earlier passes; or set them to zero, where None stays None."""
        self._before, self._scaled_by = [], None
        if set_to_none:
            self._clear()
            return
        for slot in self.slots:
            for gradient in (slot.parameter.grad, slot.trained.grad):
                if gradient is not None:
                    gradient.detach().zero_()

    def _clear(self) -> None:
        self._plan.gradients.clear()
        for slot in self.slots:
            slot.trained.grad = None
        self._exposed = []

    def _expose(self) -> None:
        self._plan.gradients.expose()
        self._exposed = [slot.trained.grad for slot in self.slots]

    def _add(self, earlier: Sequence[Tensor | None]) -> None:
        pairs = zip(self._exposed, earlier, strict=True)
        both = [(own, before) for own, before in pairs if own is not None and before is not None]
        if both:
            torch._foreach_add_([own for own, _ in both], [before for _, before in both])

    def _check(self) -> None:
        self._plan.model = _container(self._models, self._members())
        for stage in self._stages:
            stage.check(self._plan)

    def _members(self) -> Iterable[Tensor]:
        return chain.from_iterable(self._plan.groups())

    def _look(self) -> list[tuple[Any, ...]]:
        """Return what changes if parameters are added, frozen, or get other memory."""
        return [(id(member), member.requires_grad, member.data_ptr()) for member in self._members()]


def _container(models: Iterable[nn.Module], trained: Iterable[Tensor]) -> nn.Module:
    """Return a module of the models with trained parameters, and of the trained parameters in no model."""
    container, strays = nn.Module(), {id(parameter): parameter for parameter in trained}
    for number, model in enumerate(models):
        if not strays.keys().isdisjoint(map(id, model.parameters())):
            container.add_module(str(number), model)
    for parameter in container.parameters():
        strays.pop(id(parameter), None)
    for number, stray in enumerate(strays.values()):
        if not isinstance(stray, nn.Parameter):
            raise AmpError("an optimizer trains a tensor that is not an nn.Parameter", remedy="make it an nn.Parameter")
        container.register_parameter(f"of_no_model_{number}", stray)
    return container
