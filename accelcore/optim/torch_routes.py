"""torch's own optimizers as routes: fused kernels, foreach, the plain loop.

For a small update, torch's `step` takes longer around a fused kernel than in it. `FusedKernel` calls the kernel alone.
Options and state are as in torch's classes, with three differences:

- SGD's momentum starts as zeros, and the updates are the same. torch initializes it in the first step of the optimizer:
  a parameter without a gradient in that step raises a TypeError later, and a skipped first step leaves memory that was
  never written.
- A gradient whose strides differ from its parameter's is copied first: the kernels read both in order of memory.
- A step increments the version of the parameters; torch's kernels do not. Backward through values from before the step
  then raises an error instead of returning a wrong gradient.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial, update_wrapper
from itertools import chain
from types import new_class
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from accelcore.errors import TrainingError
from accelcore.known_faults import FP16_EPSILON
from accelcore.optim.engine import Engine, Memory, Request, merged
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.formulas.formula import STATE_DTYPES, not_negative
from accelcore.optim.registry import Optimizers
from accelcore.torch_internals import has_step_hooks

__all__ = ["register_torch_optimizers"]

_CLASSES: dict[str, Callable[..., Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
_BY_ELEMENT = (
    "adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd",
)  # fmt: skip
"""Optimizers that treat each element alike. Others, such as Muon, may not."""
_EPSILON = {"adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8, "nadam": 1e-8, "radam": 1e-8, "rmsprop": 1e-8}
"""Default eps of torch's classes that divide by a root plus eps."""


def register_torch_optimizers(registry: Optimizers, *, fused: tuple[str, ...], prefers_foreach: bool = False) -> None:
    """Register every class of torch.optim; those named in `fused` also by their fused kernel, which is preferred.

    Most of them treat each element alike, so that they can update many parameters as one piece of memory. They keep
    state in the dtype of the parameter. If that is low precision and the optimizer has a formula, these routes are
    refused, unless the route is named or `state_dtype` requests that precision.

    Args:
        registry: the backend's.
        fused: optimizers with a fused kernel on this device.
        prefers_foreach: whether a few launches for all tensors are faster than some for each, as on a GPU. If not,
            `foreach` is taken only by name.
    """
    for name, kind in _CLASSES.items():
        switches = _arguments_of(kind)
        memory: Memory = "any" if name in _BY_ELEMENT else "tensors"
        add = partial(registry.register, name, memory=memory)
        # Where launches cost most, kernels for many tensors have one for all, wherever the tensors are.
        for_many = partial(add, scattered=prefers_foreach)
        if name in fused:
            for_many("fused", _made_by(FUSED[name]), priority=10, supports=_fused_supports)
        loop = partial(kind, foreach=False) if "foreach" in switches else kind
        add("loop", _made_by(loop), priority=0, supports=_loop_supports)
        if "foreach" in switches:
            priority, supports = (5, _foreach_supports) if prefers_foreach else (-10, _loop_supports)
            for_many("foreach", _made_by(partial(kind, foreach=True)), priority=priority, supports=supports)
        if name in _EPSILON:
            for route in ("loop", "foreach"):
                registry.distrust(name, route, FP16_EPSILON, when=_loses_epsilon)


@cache
def _arguments_of(kind: Callable[..., Optimizer]) -> Collection[str]:
    """Return the names of a class's options. The lookup takes longer than everything else that makes a backend."""
    return inspect.signature(kind).parameters.keys()


def _made_by(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return a factory that accepts `state_dtype`, which the class lacks; `_loop_supports` has checked it."""

    def make(params: Any, *, state_dtype: str | None = None, **options: Any) -> Optimizer:
        made = kind(params, **options)
        for group in made.param_groups:
            if not isinstance(group["lr"], Tensor):  # reading one would make the host wait
                not_negative(lr=group["lr"])  # torch checks the default only, and accepts nan in SGD
        if made.state and not isinstance(made, Engine):  # an engine begins any parameter
            made.state = _InitialState(made)
        if made.defaults.get("foreach"):  # torch leaves it to each device's kernels whether autograd sees a step
            made.register_step_post_hook(_increment_versions)
        return made

    return update_wrapper(make, kind, updated=())


def _increment_versions(made: Optimizer, *_: Any) -> None:
    parameters = (parameter for group in made.param_groups for parameter in group["params"])
    increment_version([parameter for parameter in parameters if parameter.grad is not None])


class _InitialState(defaultdict[Tensor, Any]):
    """State of an optimizer whose constructor creates the state, also of parameters that are added later.

    Adagrad is the only one. Before torch 2.13 its `step` fails if a parameter has no state.
    """

    def __init__(self, made: Optimizer) -> None:
        super().__init__(dict, made.state)
        self._make: Callable[..., Optimizer] = partial(type(made), **made.defaults)

    def __missing__(self, parameter: Tensor) -> Any:
        self[parameter] = self._make([parameter]).state[parameter]
        return self[parameter]


def _loses_epsilon(request: Request) -> bool:
    """Return whether eps is added to fp16 numbers and rounds to zero."""
    in_fp16 = any(parameter.dtype == torch.float16 for parameter in request.parameters)
    given = request.values("eps", _EPSILON[request.name])
    return in_fp16 and any(isinstance(eps, int | float) and eps < 2**-25 for eps in given)


def _fused_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the fused kernel cannot be differentiated through"
    dtypes = {parameter.dtype for parameter in request.parameters if not parameter.is_floating_point()}
    if dtypes:
        return f"the fused kernel takes floating-point parameters, not {', '.join(sorted(map(str, dtypes)))}"
    if any(torch.empty_like(each, device="meta").stride() != each.stride() for each in request.parameters):
        return "the fused kernel takes parameters without gaps in their memory"
    if request.name == "sgd" and any(request.values("momentum", 0)) and any(request.values("dampening", 0)):
        return "the fused kernel would dampen the first step too"
    return _loop_supports(request)


def _foreach_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the foreach kernels cannot be differentiated through"
    numbers: list[Any] = [*request.options.values(), *(value for group in request.groups for value in group.values())]
    parts = [part for value in numbers for part in (value if isinstance(value, tuple | list) else (value,))]
    if any(isinstance(part, Tensor) for part in parts) and not all(request.values("capturable", False)):
        return "the foreach kernels take tensors as options only where capturable=True"
    return _loop_supports(request)


def _loop_supports(request: Request) -> str | None:
    dtypes = {parameter.dtype for parameter in request.parameters}
    for name in set(request.values("state_dtype", None)) - {None}:
        if others := dtypes - {STATE_DTYPES.get(name)}:
            return f"it keeps the state of {_named(others)} parameters in that precision, not in {name}"
    low = {dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize}
    if low and request.name in FORMULAS and request.route == "auto" and None in request.values("state_dtype", None):
        kept = f"it would keep the state of {_named(low)} parameters in that precision"
        return f"{kept}: request it by route or state_dtype"
    return None


def _named(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


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
    """Step of a `torch.optim` optimizer made with `fused=True`: it calls the kernel alone.

    For small parameters, the rest of torch's `step` takes longer than the kernel. The optimizer's own `step` is called
    if it may do more: if there are hooks, a profiler records, `step` was replaced, or a scheduler still waits for its
    first call. Only the optimizer's parameters and state are changed. `serves` must be true of the optimizer.
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

    def step(self) -> None:
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
