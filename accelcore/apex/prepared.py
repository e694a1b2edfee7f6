"""An optimizer as `amp.initialize` returns it: its own methods, with apex's meaning, and those that apex adds."""

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

from accelcore.apex import casts
from accelcore.apex.accumulated import Accumulated
from accelcore.apex.loss_scaling import AmpScaler
from accelcore.errors import AmpError, ConfigurationError
from accelcore.roles.loss_scaler import SkippingOptimizer
from accelcore.training.clipping import Clipping

__all__ = ["Prepared", "is_prepared", "prepared_of"]

logger = logging.getLogger("accelcore")


class Prepared:
    """What `amp.initialize` makes of an optimizer.

    Args:
        optimizer: of accelcore or of torch.
        gradients: of what it trains.
        flagged: whether the device reports overflows by a flag.
        talks: whether it says that it skips a step.
    """

    def __init__(self, optimizer: Optimizer, gradients: Accumulated, *, flagged: bool, talks: bool) -> None:
        self.gradients, self._optimizer = gradients, optimizer
        self._flagged, self._talks = flagged, talks
        self._found: Tensor | None = None  # 1.0 where the next step is to be skipped
        self._finders: list[AmpScaler] = []

    def put_on(self) -> None:
        """Bind the optimizer to what it trains, and put the methods on it."""
        self.gradients.bind()
        optimizer: Any = self._optimizer
        optimizer._amp_stash = self
        step, zero_grad = optimizer.step, optimizer.zero_grad

        # Functions, because torch's schedules wrap `step.__func__`.
        @wraps(step)
        def new_step(_: Optimizer, closure: Any = None) -> Any:
            return self._step(step, closure)

        @wraps(zero_grad)
        def new_zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            self._zero_grad(zero_grad, set_to_none)

        optimizer.step, optimizer.zero_grad = MethodType(new_step, optimizer), MethodType(new_zero_grad, optimizer)
        optimizer.clip_optimizer_grad_norm_fused = self.clip

    def found(self, overflow: Tensor | None, scaler: AmpScaler) -> None:
        """Skip the next step where a scaler has found an overflow."""
        if overflow is not None:
            self._found = overflow if self._found is None else torch.maximum(self._found, overflow)
            self._finders.append(scaler)

    def drop(self) -> None:
        """A backward pass failed: no gradient can be trusted, nor what was found in earlier ones."""
        self.gradients.drop()
        self._found, self._finders = None, []

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all that the optimizer trains together, in place.

        Args:
            max_norm: the largest norm.
            norm_type: which norm it is.

        Returns:
            The norm they had.

        Raises:
            ConfigurationError: there are no gradients. A ValueError, too.
        """
        if self.gradients.are_none:
            raise ConfigurationError("there are no gradients to clip", remedy="clip after the `with amp.scale_loss`")
        if float(norm_type) != 2.0:
            return clip_grad_norm_(self.gradients.masters, max_norm, norm_type)
        return Clipping(float(max_norm), flagged=self._flagged)(self.gradients.buffers(), lambda norm: norm)

    def _step(self, inner: Callable[[], Any], closure: Any) -> Any:
        """Update what is trained, unless a gradient overflowed; `inner`: the optimizer's own step."""
        if getattr(self._optimizer, "skips", False):
            return inner()
        if closure is not None:
            raise AmpError(
                "an optimizer that amp.initialize returned was given a closure",
                why="a closure calls backward by itself, where gradients would neither be unscaled nor checked",
                remedy="call step() after `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`",
            )
        self._check_can_step()
        with casts.suspended():
            result = self._update(inner)
            self.gradients.updated()
        if self.gradients.has_masters:
            self.gradients.drop()  # model.zero_grad() would not see those of the masters
        return result

    def _update(self, inner: Callable[[], Any]) -> Any:
        optimizer: Any = self._optimizer
        self.gradients.take_replaced()
        found, finders = self._found, self._finders
        self._found, self._finders = None, []
        if isinstance(optimizer, SkippingOptimizer) and self.gradients.are_none:
            optimizer.skip()  # as torch's optimizers, which pass over what has no gradient
            return None
        if found is None:
            return inner()
        if getattr(optimizer, "_step_supports_amp_scaling", False) and all(each.trusts_kernels for each in finders):
            optimizer.grad_scale, optimizer.found_inf = None, found
            try:
                return inner()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        if not found.item():
            return inner()
        if self._talks:
            scales = ", ".join(f"{each.loss_scale():g}" for each in dict.fromkeys(finders))
            logger.warning("a gradient overflowed: this step is skipped, and the loss scale is %s now", scales)
        if isinstance(optimizer, SkippingOptimizer):
            optimizer.skip()
        return None

    def _check_can_step(self) -> None:
        if self.gradients.are_scaled:
            raise AmpError(
                "step() after a backward pass with delay_unscale=True: the gradients are still scaled",
                remedy="leave delay_unscale out of the last `with amp.scale_loss(...)` before step()",
            )
        if self.gradients.missed_a_pass:
            raise AmpError(
                "parameters have gradients, and their fp32 masters have none",
                why="a backward pass ran outside of `with amp.scale_loss(...)`, which gives the masters theirs",
                remedy="call backward inside of it, also where no scale is needed",
            )

    def _zero_grad(self, inner: Callable[[bool], None], set_to_none: bool) -> None:
        """Drop all gradients, or set them to zero; `inner`: the optimizer's own method."""
        inner(set_to_none)
        if set_to_none:
            self.gradients.drop()
        else:
            self.gradients.set_to_zero()


def is_prepared(optimizer: Optimizer) -> bool:
    """Whether `amp.initialize` has returned this optimizer."""
    return isinstance(getattr(optimizer, "_amp_stash", None), Prepared)


def prepared_of(optimizer: Optimizer) -> Prepared:
    """What `amp.initialize` made of an optimizer.

    Raises:
        AmpError: it never saw it.
    """
    prepared = getattr(optimizer, "_amp_stash", None)
    if not isinstance(prepared, Prepared):
        raise AmpError(
            f"this {type(optimizer).__name__} was not given to amp.initialize",
            remedy="model, optimizer = amp.initialize(model, optimizer, opt_level=...)",
        )
    return prepared
