"""An optimizer that `amp.initialize` has prepared: apex's meaning of its methods, and its accumulated gradients.

After each backward pass gradients are exchanged, unscaled, and added to the gradients of earlier passes, in fp32
masters if there are any. So a step may follow several losses, each with its own scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from accelcore.apex.state import AmpScaler, casts_suspended
from accelcore.backend import Backend
from accelcore.errors import AmpError, ConfigurationError, Once, logger
from accelcore.optim.flat.memory import Slot
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.precision.policy import Policy
from accelcore.scaling.contract import step_in_kernel
from accelcore.training.gradients import Clipping
from accelcore.training.nonfinite import first_not_finite
from accelcore.training.options import complete
from accelcore.training.parallel import create_strategy
from accelcore.training.parallel.strategy import (
    SingleProcess,
    all_reduce_gradients,
    broadcast_masters,
    broadcast_tensors,
)
from accelcore.training.plan import Plan
from accelcore.training.stages.parameters import Bind


class Prepared:
    """Optimizer that `amp.initialize` has prepared: the gradients for its next step, overflows and methods.

    If the optimizer cannot be used so, the constructor raises, and nothing has changed. `flat`: whether parameters and
    gradients lie in one piece of memory each. `exchanges`: whether ranks exchange gradients here.
    """

    def __init__(
        self,
        backend: Backend,
        models: Sequence[nn.Module],
        optimizer: Optimizer,
        policy: Policy,
        *,
        flat: bool,
        exchanges: bool,
        warns: bool,
    ) -> None:
        options = complete({"flat": flat or None, "parallel": "combine_ddp" if exchanges else None})
        self._models, self._optimizer = models, optimizer
        self._exchanges, self._warns = exchanges, warns
        self._plan = plan = Plan(backend, nn.Module(), optimizer, options, Once(backend.collectives.rank))
        plan.policy = policy
        plan.strategy = create_strategy(backend, options) if exchanges else SingleProcess(backend, options)
        self._stage = Bind()
        self._scaled_by: tuple[AmpScaler, int] | None = None  # the scale that a delayed pass has left
        self._before: list[Tensor | None] = []  # gradients of earlier passes, by slot
        self._exposed: list[Tensor | None] = []
        self._overflow: Tensor | None = None  # 1.0 if the next step is to be skipped
        self._scalers: list[AmpScaler] = []  # those that checked for overflows since the last step
        self._check()

    @property
    def masters(self) -> list[Tensor]:
        """The tensors that the optimizer updates, in the order of its groups: fp32 masters, or the parameters."""
        self._plan.gradients.refresh()
        trained = {id(slot.parameter): slot.trained for slot in self._slots}
        return [trained.get(id(member), member) for member in self._members()]

    def install(self, exact: Mapping[int, Tensor]) -> None:
        """Bind the optimizer to its parameters or masters, which start from `exact`, and replace its methods."""
        self._bind(exact)
        optimizer: Any = self._optimizer
        optimizer._amp_stash = self
        step, zero_grad = optimizer.step, optimizer.zero_grad

        # Functions, because torch's schedulers wrap `step.__func__`.
        @wraps(step)
        def new_step(_: Optimizer, closure: Any = None) -> Any:
            return self._step(step, closure)

        @wraps(zero_grad)
        def new_zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            self._drop_gradients(set_to_none=set_to_none)

        optimizer.step, optimizer.zero_grad = MethodType(new_step, optimizer), MethodType(new_zero_grad, optimizer)
        optimizer.clip_optimizer_grad_norm_fused = self.clip

    def begin(self, scaler: AmpScaler) -> None:
        """Begin a backward pass of a loss that this scaler has scaled."""
        if self._scaled_by is not None:
            if self._scaled_by != (scaler, scaler.passes):
                raise AmpError(
                    "gradients of a pass with delay_unscale=True would be divided by another loss scale than its own",
                    why="the pass after it has another loss_id, or the scale has moved between them",
                    remedy="give both the same loss_id and optimizers, or remove delay_unscale",
                )
            return
        if self._before:
            raise AmpError(
                "amp.scale_loss within amp.scale_loss, of one optimizer",
                remedy="leave the first before the second, or add the losses up",
            )
        held = {id(slot.parameter): slot.trained.grad for slot in self._slots}
        if self._members_now() != self._seen:
            self._check()
            self._bind()
        before = [held.get(id(slot.parameter)) for slot in self._slots]
        # This pass will write to the memory of flat gradients and of masters' gradients.
        reused = self._is_flat or self._has_masters
        self._before = [each.clone() if each is not None and reused else each for each in before]
        self._clear()

    def delay(self, scaler: AmpScaler) -> None:
        """End a backward pass, and leave its gradients scaled."""
        self._scaled_by = (scaler, scaler.passes)

    def end(self, scaler: AmpScaler) -> None:
        """End a backward pass: exchange its gradients, unscale them, add the gradients of earlier passes."""
        gradients, strategy = self._plan.gradients, self._plan.strategy
        for slot, before in zip(self._slots, self._before, strict=True):
            if before is not None and slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
        gradients.collect()
        if strategy.divisor > 1 and getattr(self._optimizer, "combine_ddp", True):
            all_reduce_gradients(self._plan.backend.collectives, gradients, divisor=strategy.divisor)
        gradients.grads_to_masters()
        scaler.inner.unscale_(self._optimizer, gradients.buffers(), strategy.agree)
        self._expose()
        self._add(self._before)
        self._before, self._scaled_by = [], None

    def first_not_finite(self) -> str | None:
        """Return the name of the first parameter whose gradient has an inf or NaN. Waits for the device."""
        return first_not_finite(self._plan.gradients, self._plan.gradients.of_values())

    def record_overflow(self, overflow: Tensor | None, scaler: AmpScaler) -> None:
        """Skip the next step if a scaler has found an overflow; None means that it did not check."""
        if overflow is not None:
            self._overflow = overflow if self._overflow is None else torch.maximum(self._overflow, overflow)
            self._scalers.append(scaler)

    def drop(self) -> None:
        """Drop all gradients and overflows, after a backward pass that failed."""
        self._drop_gradients()
        self._overflow, self._scalers = None, []

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all the optimizer's parameters together, in place; return the norm before clipping."""
        if self._are_none:
            raise ConfigurationError("there are no gradients to clip", remedy="clip after the `with amp.scale_loss`")
        if float(norm_type) != 2.0:
            return clip_grad_norm_(self.masters, max_norm, norm_type)
        self._take_replaced()
        clipping = Clipping(float(max_norm), flagged=self._plan.backend.capabilities.overflow_flag)
        return clipping(self._plan.gradients.buffers(), lambda norm: norm)

    def _step(self, step: Callable[[], Any], closure: Any) -> Any:
        """Update the parameters unless a gradient overflowed; `step` is the optimizer's own method."""
        if closure is not None:
            raise AmpError(
                "an optimizer that amp.initialize returned was given a closure",
                why="a closure calls backward by itself, where gradients would neither be unscaled nor checked",
                remedy="call step() after `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`",
            )
        self._check_complete()
        with casts_suspended():
            result = self._update(step)
            self._plan.gradients.masters_to_params()
            if self._exchanges and self._plan.backend.collectives.world_size > 1:
                broadcast_tensors(self._plan.backend.collectives, list(self._plan.model.buffers()))
        if self._has_masters:
            self._drop_gradients()  # model.zero_grad() does not reach the masters' gradients
        return result

    def _update(self, step: Callable[[], Any]) -> Any:
        optimizer: Any = self._optimizer
        self._take_replaced()
        overflow, scalers = self._overflow, self._scalers
        self._overflow, self._scalers = None, []
        if hasattr(optimizer, "skip") and self._are_none:
            optimizer.skip()  # as torch's optimizers do without gradients
            return None
        if overflow is None:
            return step()
        if getattr(optimizer, "_step_supports_amp_scaling", False) and all(each.trusts_kernels for each in scalers):
            return step_in_kernel(optimizer, overflow, None, step)
        if not overflow.item():
            return step()
        if self._warns:
            scales = ", ".join(f"{each.loss_scale():g}" for each in dict.fromkeys(scalers))
            logger.warning("a gradient overflowed: this step is skipped, and the loss scale is now %s", scales)
        if hasattr(optimizer, "skip"):
            optimizer.skip()
        return None

    def _bind(self, exact: Mapping[int, Tensor] | None = None) -> None:
        """Bind the optimizer to its present parameters; if ranks exchange gradients, with rank 0's values."""
        plan = self._plan
        plan.exact = dict(exact or {})
        self._stage.apply(plan)
        if self._exchanges:
            plan.strategy.replicate(plan.model, plan.gradients)
            broadcast_masters(plan.strategy, plan.gradients)
        runs = self._optimizer.bound if isinstance(self._optimizer, RoutedOptimizer) else None
        self._is_flat = bool(plan.options["flat"]) or any(run.memory is not None for run in runs or ())
        self._has_masters = any(slot.trained is not slot.parameter for slot in self._slots)
        self._seen = self._members_now()

    def _check_complete(self) -> None:
        """Raise AmpError if the gradients are still scaled, or masters have not received theirs."""
        if self._scaled_by is not None:
            raise AmpError(
                "step() after a backward pass with delay_unscale=True: the gradients are still scaled",
                remedy="remove delay_unscale from the last `with amp.scale_loss(...)` before step()",
            )
        missed = (slot.trained.grad is None and slot.parameter.grad is not None for slot in self._slots)
        if not self._exposed and any(missed):
            raise AmpError(
                "parameters have gradients, but their fp32 masters have none",
                why="a backward pass ran outside of `with amp.scale_loss(...)`, which gives masters their gradients",
                remedy="call backward inside of it, even if no scale is needed",
            )

    def _take_replaced(self) -> None:
        """Copy gradients into flat memory if the script has replaced them by others."""
        now = [slot.trained.grad for slot in self._slots]
        if not self._is_flat or all(a is b for a, b in zip(now, self._exposed or [None] * len(now), strict=True)):
            return
        wanted = [None if gradient is None else gradient.clone() for gradient in now]
        for slot, gradient in zip(self._slots, wanted, strict=True):
            slot.parameter.grad = None if gradient is None else torch.zeros_like(slot.parameter)
        self._plan.gradients.collect()
        self._plan.gradients.grads_to_masters()
        self._expose()
        self._add(wanted)

    def _drop_gradients(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, also of earlier passes; or set all but None to zero."""
        self._before, self._scaled_by = [], None
        if set_to_none:
            self._clear()
            return
        for slot in self._slots:
            for gradient in (slot.parameter.grad, slot.trained.grad):
                if gradient is not None:
                    gradient.detach().zero_()

    @property
    def _slots(self) -> Sequence[Slot]:
        return self._plan.gradients.slots

    @property
    def _are_none(self) -> bool:
        return all(slot.trained.grad is None for slot in self._slots)

    def _clear(self) -> None:
        self._plan.gradients.clear()
        for slot in self._slots:
            slot.trained.grad = None
        self._exposed = []

    def _expose(self) -> None:
        self._plan.gradients.expose()
        self._exposed = [slot.trained.grad for slot in self._slots]

    def _add(self, earlier: Sequence[Tensor | None]) -> None:
        pairs = zip(self._exposed, earlier, strict=True)
        both = [(own, before) for own, before in pairs if own is not None and before is not None]
        if both:
            torch._foreach_add_([own for own, _ in both], [before for _, before in both])

    def _check(self) -> None:
        self._plan.model = _container(self._models, self._members())
        self._stage.check(self._plan)

    def _members(self) -> Iterable[Tensor]:
        return chain.from_iterable(self._plan.groups())

    def _members_now(self) -> list[tuple[Any, ...]]:
        """Return what changes if parameters are added, frozen, or get other memory."""
        return [(id(member), member.requires_grad, member.data_ptr()) for member in self._members()]


def is_prepared(optimizer: Optimizer) -> bool:
    """Return whether `amp.initialize` has prepared this optimizer."""
    return isinstance(getattr(optimizer, "_amp_stash", None), Prepared)


def prepared_of(optimizer: Optimizer) -> Prepared:
    """Return the `Prepared` of an optimizer; raise AmpError if `amp.initialize` has not prepared it."""
    prepared = getattr(optimizer, "_amp_stash", None)
    if not isinstance(prepared, Prepared):
        raise AmpError(
            f"this {type(optimizer).__name__} was not given to amp.initialize",
            remedy="model, optimizer = amp.initialize(model, optimizer, opt_level=...)",
        )
    return prepared


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
