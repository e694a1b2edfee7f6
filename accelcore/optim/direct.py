"""torch's own optimizers, stepped by a shorter way to the same kernel."""

from __future__ import annotations

from inspect import unwrap
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, optimizer

from accelcore.optim.fused import KERNELS
from accelcore.optim.fused_kernels import FusedKernel
from accelcore.optim.stepping import step_scaled
from accelcore.roles.scaled_gradients import Steppable

__all__ = ["directly"]


class _Direct:
    """Steps an optimizer of torch's that was made with `fused=True`, as its own `step` would.

    What torch does around the kernel takes as long as the kernel, where parameters are small: it looks at each one
    again and again, labels profiles and runs hooks. Groups, options and state are the optimizer's own, so that its
    owner may change, save and step it at any time. Its `step` is called wherever that may do anything else: there are
    hooks, a profiler wants its labels, or `step` was replaced.

    Attributes:
        grad_scale, found_inf: set by a scaler for one step, as on torch's.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, optimizer: Optimizer, kernel: FusedKernel) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._step_of_class = type(optimizer).step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self._optimizer.param_groups

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self._optimizer, "_step_supports_amp_scaling", False))

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        stepped: Any = self._optimizer
        if self._does_more():
            step_scaled(stepped, self.found_inf, self.grad_scale)
            return
        with torch.no_grad():
            self._kernel.update(stepped, self.found_inf, self.grad_scale)
        stepped._opt_called = True  # what a scheduler of torch's warns without

    def _does_more(self) -> bool:
        """Whether the optimizer's own `step` would do anything beside the update by its fused kernel."""
        stepped: Any = self._optimizer
        step = self._step_of_class
        own = vars(stepped).get("step", step)
        return bool(
            type(stepped).step is not step
            or not (own is step or _only_notes_calls(own, step))
            or stepped._optimizer_step_pre_hooks
            or stepped._optimizer_step_post_hooks
            or optimizer._global_optimizer_pre_hooks
            or optimizer._global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
            or not all(map(_by_kernel, stepped.param_groups))
        )


def directly(optimizer: Optimizer) -> Steppable:
    """What steps `optimizer` in the shortest way: itself, unless its fused kernel can be called without its `step`."""
    kernel = KERNELS.get(type(optimizer))
    if kernel is None or not unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
        return optimizer
    tensors = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    plain = all(type(tensor) in (Tensor, Parameter) and tensor.is_floating_point() for tensor in tensors)
    return _Direct(optimizer, kernel()) if plain else optimizer


def _only_notes_calls(step: Any, wrapped: Any) -> bool:
    """Whether this is what torch's schedulers wrap `step` in, to know that it was called."""
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is wrapped


def _by_kernel(group: dict[str, Any]) -> bool:
    """Whether torch would update this group by the fused kernel, and its first step is like any other."""
    dampens = group.get("momentum") and group.get("dampening")
    return bool(group["fused"]) and not group["differentiable"] and not dampens
