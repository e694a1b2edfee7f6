"""torch's own optimizers as routes: the fused kernel where the device has one, the plain loop everywhere.

The `foreach` route is registered too, for those who ask for it: on a CPU it was measured slower than the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

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
FUSED_PRIORITY, LOOP_PRIORITY, FOREACH_PRIORITY = 10, 0, -10


def register_torch_optimizers(registry: Optimizers, *, fused: tuple[str, ...]) -> None:
    """Register torch.optim's classes; those named in `fused` also with their fused kernel, which is preferred."""
    for name, kind in _CLASSES.items():
        if name in fused:
            registry.register(
                name, "fused", partial(kind, fused=True), priority=FUSED_PRIORITY, supports=_fused_supports
            )
        registry.register(name, "loop", partial(kind, foreach=False), priority=LOOP_PRIORITY, supports=_own_switches)
        registry.register(
            name, "foreach", partial(kind, foreach=True), priority=FOREACH_PRIORITY, supports=_own_switches
        )


def _fused_supports(request: Request) -> str | None:
    if request.options.get("differentiable"):
        return "the fused kernel cannot be differentiated through"
    dtypes = {parameter.dtype for parameter in request.parameters if not parameter.is_floating_point()}
    if dtypes:
        return f"the fused kernel takes floating-point parameters, not {', '.join(sorted(map(str, dtypes)))}"
    return _own_switches(request)


def _own_switches(request: Request) -> str | None:
    given = [switch for switch in ("fused", "foreach") if switch in request.options]
    return f"say route=... instead of {given[0]}=" if given else None
