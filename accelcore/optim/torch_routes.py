"""torch's own optimizers as routes: fused kernels, foreach, the plain loop."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from accelcore.known_faults import FP16_EPSILON
from accelcore.optim.engine import Engine, Memory, Request
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.formulas.formula import STATE_DTYPES, not_negative
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_fused import FUSED

__all__ = ["register_torch_optimizers"]

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
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
        switches = _options_of(kind)
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
def _options_of(kind: Callable[..., torch.optim.Optimizer]) -> Collection[str]:
    """Return the names of a class's options; to look them up takes longer than all else that makes a backend."""
    return inspect.signature(kind).parameters.keys()


def _made_by(kind: Callable[..., torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a factory that accepts `state_dtype`, which the class lacks; `_loop_supports` has checked it."""

    def make(params: Any, *, state_dtype: str | None = None, **options: Any) -> torch.optim.Optimizer:
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


def _increment_versions(made: torch.optim.Optimizer, *_: Any) -> None:
    parameters = (parameter for group in made.param_groups for parameter in group["params"])
    increment_version([parameter for parameter in parameters if parameter.grad is not None])


class _InitialState(defaultdict[Tensor, Any]):
    """State of an optimizer whose constructor creates it. It also begins the state of parameters that came later.

    Adagrad is the only one. Before torch 2.13 its `step` fails if a parameter has no state.
    """

    def __init__(self, made: torch.optim.Optimizer) -> None:
        super().__init__(dict, made.state)
        self._make: Callable[..., torch.optim.Optimizer] = partial(type(made), **made.defaults)

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
