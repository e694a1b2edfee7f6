"""Optimizer methods with apex's meaning, which `amp.initialize` puts on an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from accelcore.apex.accumulated import Accumulated
from accelcore.apex.state import AmpScaler, casts_suspended
from accelcore.errors import AmpError, ConfigurationError
from accelcore.scaling.contract import SkippingOptimizer
from accelcore.training.clipping import Clipping

__all__ = ["Prepared", "is_prepared", "prepared_of"]

logger = logging.getLogger("accelcore")


class Prepared:
    """Optimizer that `amp.initialize` has prepared: its gradients, overflows and methods.

    `flagged`: whether the device reports overflows by a flag. `warns`: whether a skipped step is logged.
    """

    def __init__(self, optimizer: Optimizer, gradients: Accumulated, *, flagged: bool, warns: bool) -> None:
        self.gradients, self._optimizer = gradients, optimizer
        self._flagged, self._warns = flagged, warns
        self._overflow: Tensor | None = None  # 1.0 if the next step is to be skipped
        self._scalers: list[AmpScaler] = []  # those that checked for overflows since the last step

    def install(self) -> None:
        """Bind the optimizer to its parameters or masters, and replace its methods."""
        self.gradients.bind()
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
            self.gradients.drop(set_to_none=set_to_none)

        optimizer.step, optimizer.zero_grad = MethodType(new_step, optimizer), MethodType(new_zero_grad, optimizer)
        optimizer.clip_optimizer_grad_norm_fused = self.clip

    def record_overflow(self, overflow: Tensor | None, scaler: AmpScaler) -> None:
        """Skip the next step if a scaler has found an overflow; None means that it did not check."""
        if overflow is not None:
            self._overflow = overflow if self._overflow is None else torch.maximum(self._overflow, overflow)
            self._scalers.append(scaler)

    def drop(self) -> None:
        """Drop all gradients and overflows, after a backward pass that failed."""
        self.gradients.drop()
        self._overflow, self._scalers = None, []

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all the optimizer's parameters together, in place; return the norm before clipping.

        Raises:
            ConfigurationError: there are no gradients. It is a ValueError, too.
        """
        if self.gradients.are_none:
            raise ConfigurationError("there are no gradients to clip", remedy="clip after the `with amp.scale_loss`")
        if float(norm_type) != 2.0:
            return clip_grad_norm_(self.gradients.masters, max_norm, norm_type)
        return Clipping(float(max_norm), flagged=self._flagged)(self.gradients.buffers(), lambda norm: norm)

    def _step(self, step: Callable[[], Any], closure: Any) -> Any:
        """Update the parameters unless a gradient overflowed; `step` is the optimizer's own method."""
        if getattr(self._optimizer, "skips", False):
            return step()
        if closure is not None:
            raise AmpError(
                "an optimizer that amp.initialize returned was given a closure",
                why="a closure calls backward by itself, where gradients would neither be unscaled nor checked",
                remedy="call step() after `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`",
            )
        self.gradients.check_complete()
        with casts_suspended():
            result = self._update(step)
            self.gradients.updated()
        if self.gradients.has_masters:
            self.gradients.drop()  # model.zero_grad() does not reach the masters' gradients
        return result

    def _update(self, step: Callable[[], Any]) -> Any:
        optimizer: Any = self._optimizer
        self.gradients.take_replaced()
        overflow, scalers = self._overflow, self._scalers
        self._overflow, self._scalers = None, []
        if isinstance(optimizer, SkippingOptimizer) and self.gradients.are_none:
            optimizer.skip()  # as torch's optimizers do without gradients
            return None
        if overflow is None:
            return step()
        if getattr(optimizer, "_step_supports_amp_scaling", False) and all(each.trusts_kernels for each in scalers):
            optimizer.grad_scale, optimizer.found_inf = None, overflow
            try:
                return step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        if not overflow.item():
            return step()
        if self._warns:
            scales = ", ".join(f"{each.loss_scale():g}" for each in dict.fromkeys(scalers))
            logger.warning("a gradient overflowed: this step is skipped, and the loss scale is now %s", scales)
        if isinstance(optimizer, SkippingOptimizer):
            optimizer.skip()
        return None


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
