"""torch's own optimizers as routes: the fused kernel where the device has one, foreach, the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.fused import FUSED
from accelcore.roles.optimizers import Optimizers, Request

__all__ = ["register_torch_optimizers"]

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
_FUSED_PRIORITY, _LOOP_PRIORITY = 10, 0
_FOREACH_PRIORITY = {True: 5, False: -10}


def register_torch_optimizers(
    registry: Optimizers,
    *,
    fused: tuple[str, ...],
    prefers_foreach: bool = False,
    refuses: Callable[[Request], str | None] = lambda request: None,
) -> None:
    """Register torch.optim's classes; those named in `fused` also with their fused kernel, which is preferred.

    All of them treat each element alike, so that each can update many parameters as one piece of memory.

    Args:
        registry: the backend's.
        fused: optimizers with a fused kernel on this device.
        prefers_foreach: whether a few launches for all tensors beat some for each, as on a GPU. On a CPU `foreach` was
            measured slower than the loop, and is for those who ask for it.
        refuses: why this device's fused kernel cannot serve a request, or None.
    """

    def fused_supports(request: Request) -> str | None:
        return _fused_supports(request) or refuses(request)

    for name, kind in _CLASSES.items():
        loop, foreach = partial(kind, foreach=False), partial(kind, foreach=True)
        if name in fused:
            registry.register(
                name, "fused", FUSED[name], priority=_FUSED_PRIORITY, supports=fused_supports, memory="any"
            )  # fmt: skip
        registry.register(name, "loop", loop, priority=_LOOP_PRIORITY, supports=_own_switches, memory="any")
        registry.register(
            name,
            "foreach",
            foreach,
            priority=_FOREACH_PRIORITY[prefers_foreach],
            supports=_foreach_supports if prefers_foreach else _own_switches,
            memory="any",
        )


def _fused_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the fused kernel cannot be differentiated through"
    dtypes = {parameter.dtype for parameter in request.parameters if not parameter.is_floating_point()}
    if dtypes:
        return f"the fused kernel takes floating-point parameters, not {', '.join(sorted(map(str, dtypes)))}"
    if any(
        torch.empty_like(parameter, device="meta").stride() != parameter.stride() for parameter in request.parameters
    ):
        return "the fused kernel takes parameters without gaps in their memory"
    if request.name == "sgd" and any(request.values("momentum", 0)) and any(request.values("dampening", 0)):
        return "the fused kernel would dampen the first step too"
    return _own_switches(request)


def _foreach_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the foreach kernels cannot be differentiated through"
    numbers: list[Any] = [*request.options.values(), *(value for group in request.groups for value in group.values())]
    parts = [part for value in numbers for part in (value if isinstance(value, tuple | list) else (value,))]
    if any(isinstance(part, Tensor) for part in parts) and not all(request.values("capturable", False)):
        return "the foreach kernels take tensors as options only where capturable=True"
    return _own_switches(request)


def _own_switches(request: Request) -> str | None:
    given = [switch for switch in ("fused", "foreach") if switch in request.options]
    return f"say route=... instead of {given[0]}=" if given else None
