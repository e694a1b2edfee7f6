"""torch's own optimizers as routes: the fused kernel where the device has one, the plain loop everywhere.

The `foreach` route is registered too, for those who ask for it: on a CPU it was measured slower than the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accelcore.errors import TrainingError
from accelcore.roles.optimizers import Optimizers, Request

__all__ = ["FusedSGD", "register_torch_optimizers"]

FUSED_PRIORITY, LOOP_PRIORITY, FOREACH_PRIORITY = 10, 0, -10


class FusedSGD(torch.optim.SGD):
    """torch's SGD with its fused kernel, and momentum that survives an odd start.

    torch takes the first update of all parameters for the first of each. A parameter whose first gradient comes later
    is a TypeError then, and a first step that is skipped for overflow leaves momentum that was never written, which the
    next step reads. Momentum that starts as zeros has neither problem, and gives the same updates where dampening is 0.
    And not every device's kernel takes every dtype, so parameters that were cast since are refused.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self._dtypes = {parameter.dtype for group in self.param_groups for parameter in group["params"]}
        self.register_step_pre_hook(_prepare)


def _prepare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    assert isinstance(optimizer, FusedSGD)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype not in optimizer._dtypes:
                raise TrainingError(
                    f"a parameter was cast to {parameter.dtype} after its optimizer was made",
                    remedy="make the optimizer from the parameters as they will be trained",
                )
            starts = group["momentum"] and parameter.grad is not None
            if starts and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


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


def register_torch_optimizers(
    registry: Optimizers,
    *,
    fused: tuple[str, ...],
    refuses: Callable[[Request], str | None] = lambda request: None,
) -> None:
    """Register torch.optim's classes; those named in `fused` also with their fused kernel, which is preferred.

    Args:
        registry: the backend's.
        fused: optimizers with a fused kernel on this device.
        refuses: why this device's kernel cannot serve a request, or None.
    """

    def supports(request: Request) -> str | None:
        return _fused_supports(request) or refuses(request)

    for name, kind in _CLASSES.items():
        if name in fused:
            factory = FusedSGD if name == "sgd" else partial(kind, fused=True)
            registry.register(name, "fused", factory, priority=FUSED_PRIORITY, supports=supports)
        for route, foreach, priority in (("loop", False, LOOP_PRIORITY), ("foreach", True, FOREACH_PRIORITY)):
            registry.register(name, route, partial(kind, foreach=foreach), priority=priority, supports=_own_switches)


def _fused_supports(request: Request) -> str | None:
    if any(request.values("differentiable", False)):
        return "the fused kernel cannot be differentiated through"
    dtypes = {parameter.dtype for parameter in request.parameters if not parameter.is_floating_point()}
    if dtypes:
        return f"the fused kernel takes floating-point parameters, not {', '.join(sorted(map(str, dtypes)))}"
    if request.name == "sgd" and any(request.values("momentum", 0)) and any(request.values("dampening", 0)):
        return "the fused kernel would dampen the first step too"
    return _own_switches(request)


def _own_switches(request: Request) -> str | None:
    given = [switch for switch in ("fused", "foreach") if switch in request.options]
    return f"say route=... instead of {given[0]}=" if given else None
