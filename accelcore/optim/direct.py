"""torch's own optimizers, stepped by a shorter way to the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, optimizer

from accelcore.optim.fused import KERNELS
from accelcore.optim.fused_kernels import FusedKernel

__all__ = ["Direct"]

_TORCHS = tuple(f"{folder}/" for folder in torch.optim.__path__)


class Direct:
    """Has an optimizer of torch's that was made with `fused=True` stepped as its own `step` would, in less time.

    What torch does around the kernel takes longer than the kernel, where parameters are small: it looks at each one
    again and again, labels profiles and runs hooks. Groups, options and state are the optimizer's own, so that its
    owner may change, save and step it at any time. Its `step` is called wherever that may do anything else: there are
    hooks, a profiler wants its labels, `step` was replaced, or a scheduler waits to see it called.

    Args:
        optimizer: one that `of` takes.
        kernel: that of its class.
    """

    def __init__(self, optimizer: Optimizer, kernel: FusedKernel) -> None:
        self._optimizer, self._kernel = optimizer, kernel
        self._class_step = type(optimizer).step
        self._seen: object = None  # the wrapper of a scheduler that has seen a step

    @classmethod
    def of(cls, optimizer: Optimizer) -> Direct | None:
        """What steps this optimizer in less time; None where nothing does."""
        kernel = KERNELS.get(type(optimizer))
        if kernel is None or not _is_torchs(type(optimizer).step):
            return None
        tensors = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        plain = all(type(tensor) in (Tensor, Parameter) and tensor.is_floating_point() for tensor in tensors)
        return cls(optimizer, kernel()) if plain else None

    def __call__(self, step: Callable[[], None]) -> None:
        """Call `step`, which calls the optimizer's once, or not, as a scaler does."""
        given: Any = self._optimizer
        own = vars(given).get("step")
        if self._does_more(own):
            step()
            self._seen = own if _only_notes_calls(own, self._class_step) else None
            return
        given.step = self._update
        try:
            step()
        finally:
            if own is None:
                del given.step
            else:
                given.step = own

    def _update(self) -> None:
        given: Any = self._optimizer
        with torch.no_grad():
            self._kernel.update(given, getattr(given, "found_inf", None), getattr(given, "grad_scale", None))

    def _does_more(self, own: object) -> bool:
        """Whether `step`, the class's or the optimizer's own, does anything beside the update by the kernel."""
        given: Any = self._optimizer
        return bool(
            own is not self._seen
            or type(given).step is not self._class_step
            or given._optimizer_step_pre_hooks
            or given._optimizer_step_post_hooks
            or optimizer._global_optimizer_pre_hooks
            or optimizer._global_optimizer_post_hooks
            or torch._C._autograd._profiler_enabled()
            or not all(map(_by_kernel, given.param_groups))
        )


def _is_torchs(step: Any) -> bool:
    """Whether a step, and all that it is wrapped in, is torch's."""
    while step is not None:
        if not step.__code__.co_filename.startswith(_TORCHS):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _only_notes_calls(step: Any, wrapped: Any) -> bool:
    """Whether this is what torch's schedulers wrap `step` in, to know that it was called."""
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is wrapped


def _by_kernel(group: dict[str, Any]) -> bool:
    """Whether torch would update this group by the fused kernel, and its first step is like any other."""
    dampens = group.get("momentum") and group.get("dampening")
    return bool(group["fused"]) and not group["differentiable"] and not dampens
