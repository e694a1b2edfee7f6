"""torch's optimizers by their fused kernels, without the work of their `step` around the kernel.

That work takes longer than a small update. Options and state are as in torch's classes, with three differences:

- SGD's momentum starts as zeros. torch initializes it in the first step of the whole optimizer. A later first gradient
  is then a TypeError, and a skipped first step leaves memory that was never written. The updates are the same.
- A gradient whose strides differ from its parameter's is copied first: the kernels read both in order of memory.
- A step increments the version of the parameters, which torch's kernels leave: backward through values of before the
  step is then an error, and no wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from types import new_class
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from accelcore.errors import TrainingError
from accelcore.optim.engine import Engine, merged
from accelcore.torch_internals import has_step_hooks

_Kernel = tuple[Callable[..., object], tuple[str, ...], dict[str, float], dict[str, Any]]
"""A kernel of torch for a parameter group, as a plain tuple: each step makes one.

The kernel; the names of its states, in the order of its arguments; the states that a tensor has, each with the value it
starts with; the options that not every kernel has.
"""

_MOMENTS = {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
_AND_LARGEST = {**_MOMENTS, "max_exp_avg_sq": 0.0}


def _adam(group: dict[str, Any]) -> _Kernel:
    (beta1, beta2), amsgrad = group["betas"], group["amsgrad"]
    numbers = {
        "beta1": beta1.item() if isinstance(beta1, Tensor) else beta1,
        "beta2": beta2.item() if isinstance(beta2, Tensor) else beta2,
        "eps": group["eps"],
        "amsgrad": amsgrad,
    }
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
    return kernel, states, _AND_LARGEST if amsgrad else _MOMENTS, numbers


def _adagrad(group: dict[str, Any]) -> _Kernel:
    starts = {"step": 0.0, "sum": group["initial_accumulator_value"]}
    return torch._fused_adagrad_, ("sum", "step"), starts, {"lr_decay": group["lr_decay"], "eps": group["eps"]}


def _sgd(group: dict[str, Any]) -> _Kernel:
    numbers = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
    starts = {"momentum_buffer": 0.0} if group["momentum"] else {}
    return torch._fused_sgd_, ("momentum_buffer",), starts, {"is_first_step": False, **numbers}


_KERNELS: dict[type[Optimizer], Callable[[dict[str, Any]], _Kernel]] = {
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
}
"""The kernel of each class of `torch.optim` that has one."""


class FusedKernel:
    """Calls of torch's fused kernel for a class of `torch.optim`, whose options and state the optimizer has."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._of_group, self._ones = _KERNELS[kind], dict[torch.device, Tensor]()

    def update(self, optimizer: Optimizer, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update the parameters that have a gradient, as `Engine.update`."""
        for group in merged(optimizer.param_groups):
            kernel, states, starts, numbers = self._of_group(group)
            lr, counts = group["lr"], "step" in starts
            for tensors in _alike([tensor for tensor in group["params"] if tensor.grad is not None]):
                device, gradients = tensors[0].device, _gradients(tensors)
                entries = [optimizer.state[tensor] for tensor in tensors] if starts else []
                if not (counts and all(entries)):  # SGD without momentum saves a momentum of None
                    for entry, tensor in zip(entries, tensors, strict=bool(entries)):
                        if entry.get(states[0]) is None:
                            entry.update(_begin(tensor, starts))  # at once: memory may run out in between
                state = [[entry[name] for entry in entries] if name in starts else [] for name in states]
                if counts:
                    _add(state[-1], self._one(device) if found_inf is None else 1 - found_inf)
                kernel(
                    tensors,
                    gradients,
                    *state,
                    lr=lr.to(device, non_blocking=True) if isinstance(lr, Tensor) and not lr.is_cpu else lr,
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                    found_inf=found_inf,
                    grad_scale=grad_scale,
                    **numbers,
                )
                increment_version(tensors)

    def _one(self, device: torch.device) -> Tensor:
        if device not in self._ones:  # torch would convert a number each time
            self._ones[device] = torch.ones((), device=device)
        return self._ones[device]


_STEPS = {kind: kind.step for kind in _KERNELS}  # their `step`, to detect one that is replaced later


class _Fused(Engine, Optimizer):
    """Mixin that goes before one of torch's classes, whose options it has."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)  # type: ignore[call-arg]  # torch's class comes next
        self._kernel = FusedKernel(next(base for base in type(self).__mro__ if base in _KERNELS))

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        self._kernel.update(self, found_inf, grad_scale)


FUSED: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): new_class(f"Fused{kind.__name__}", (_Fused, kind)) for kind in _KERNELS
}
"""torch's optimizers by their fused kernels, by the registry's name."""


class FusedStep:
    """Step of a `torch.optim` optimizer made with `fused=True`, without what its own `step` does around the kernel.

    That takes longer than the kernel if the parameters are small. The optimizer's own `step` is called if it may do
    more: if there are hooks, a profiler records, `step` was replaced, or a scheduler still waits for its first call.
    Nothing of the optimizer is changed except its parameters and state. `serves` must be true of it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._kernel = FusedKernel(type(optimizer))
        self._class_step = type(optimizer).step

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Return whether torch's own class made the optimizer, of plain floating-point parameters."""
        kind = type(optimizer)
        if kind not in _KERNELS:
            return False
        as_imported = _STEPS[kind]
        # torch wraps the step of a class once, when the first optimizer of it is made.
        before = None if hasattr(as_imported, "hooked") else getattr(kind.step, "__wrapped__", None)
        tensors = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        return as_imported in (kind.step, before) and all(
            type(tensor) in (Tensor, Parameter) and tensor.is_floating_point() for tensor in tensors
        )

    def __call__(self) -> None:
        if self._needs_own_step():
            self._optimizer.step()
        else:
            with torch.no_grad():
                self._kernel.update(self._optimizer, None, None)

    def _needs_own_step(self) -> bool:
        optimizer = self._optimizer
        replaced = vars(optimizer).get("step")
        # Schedulers of torch wrap `step` to set `_opt_called`, and do nothing more.
        notes = hasattr(replaced, "_wrapped_by_lr_sched") and replaced.__wrapped__ is self._class_step
        return bool(
            (replaced is not None and not (notes and getattr(optimizer, "_opt_called", False)))
            or type(optimizer).step is not self._class_step
            or has_step_hooks(optimizer)
            or not all(map(_is_fused, optimizer.param_groups))
        )


def _is_fused(group: dict[str, Any]) -> bool:
    """Return whether torch updates this group by the fused kernel, the first step like any other."""
    dampens = group.get("momentum") and group.get("dampening")
    return bool(group["fused"]) and not group["differentiable"] and not dampens


def _alike(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    if len(tensors) == 1:
        return (tensors,)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return alike.values()


def _gradients(tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients with the strides of their tensors."""
    gradients: list[Any] = [tensor.grad for tensor in tensors]
    if True in [gradient.is_sparse for gradient in gradients]:
        raise TrainingError(
            "a gradient is sparse, and the fused kernel needs dense ones",
            remedy='make the embedding with sparse=False, or the optimizer with route="loop" or fused=False',
        )
    if all(map(Tensor.is_contiguous, tensors)) and all(map(Tensor.is_contiguous, gradients)):
        return gradients
    return [
        gradient if gradient.stride() == tensor.stride() else torch.empty_like(tensor).copy_(gradient)
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]


def _begin(tensor: Tensor, starts: dict[str, float]) -> dict[str, Tensor]:
    step = {"step": torch.zeros((), dtype=torch.float32, device=tensor.device)} if "step" in starts else {}
    return step | {name: torch.full_like(tensor, start) for name, start in starts.items() if name != "step"}


def _add(steps: list[Tensor], number: Tensor) -> None:
    if len(steps) == 1:  # a list of one is slower than the one
        steps[0].add_(number)
    else:
        torch._foreach_add_(steps, [number] * len(steps))
