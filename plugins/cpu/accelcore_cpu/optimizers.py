"""Optimizers of the CPU: those with a kernel of ours, the options that each passes to it, and the routes of all.

Routes are our kernels, torch's fused kernels and torch's loops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from accelcore.optim.engine import Request
from accelcore.optim.formulas import FORMULAS
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.known_faults import LOW_PRECISION_SGD
from accelcore_cpu.native import Native, refusal

FUSED = ("adagrad", "adam", "adamw", "sgd")  # optimizers with a fused kernel in torch

_PRIORITY = 20

Group = dict[str, Any]
Numbers = tuple[float, ...]


# Of each kernel: the options of a group, in the order in which its struct in kernels/*.h reads them.


def _adadelta(group: Group) -> Numbers:
    return group["lr"], group["weight_decay"], group["maximize"], group["rho"], group["eps"]


def _adam(group: Group) -> Numbers:
    shared = group["lr"], group["weight_decay"], group["maximize"], *group["betas"], group["eps"]
    return *shared, group["amsgrad"], group["decoupled_weight_decay"]


def _adamp(group: Group) -> Numbers:
    adams = group["lr"], group["weight_decay"], *group["betas"], group["eps"]
    return *adams, group["delta"], group["wd_ratio"], group["nesterov"]


def _bertadam(group: Group) -> Numbers:
    adams = group["lr"], group["weight_decay"], group["b1"], group["b2"], group["e"], group["max_grad_norm"]
    return *adams, group["warmup"], group["t_total"], _SCHEDULES[group["schedule"]]


def _lamb(group: Group) -> Numbers:
    adams = group["lr"], group["weight_decay"], *group["betas"], group["eps"]
    return *adams, group["adam"], group["use_global_grad_norm"]


def _rmsprop(group: Group) -> Numbers:
    shared = group["lr"], group["weight_decay"], group.get("maximize", False), group["alpha"], group["eps"]
    only_tf = group.get("decoupled_decay", False), group.get("lr_in_momentum", False)
    return *shared, group["momentum"], group["centered"], *only_tf


def _sgd(group: Group) -> Numbers:
    shared = group["lr"], group["weight_decay"], group["maximize"]
    return *shared, group["momentum"], group["dampening"], group["nesterov"]


def _native(
    name: str, numbers: Callable[[Group], Numbers], states: tuple[str, ...], *, by_row: bool = False
) -> type[Native]:
    """Return the formula of that name, computed by its kernel: `NativeLamb` of `Lamb`."""
    formula = FORMULAS[name]
    own = {"kernel": name, "numbers": staticmethod(numbers), "states": states, "by_row": by_row}
    return type(f"Native{formula.__name__}", (Native, formula), own)


_MOMENTS = ("exp_avg", "exp_avg_sq")
_RMSPROPS = ("square_avg", "momentum_buffer", "grad_avg")
# Numbers as in kernels/elementwise.h.
_SCHEDULES = {"warmup_constant": 0, "warmup_cosine": 1, "warmup_linear": 2, "warmup_poly": 3}

NATIVE = {
    "adadelta": _native("adadelta", _adadelta, ("square_avg", "acc_delta")),
    "adam": _native("adam", _adam, (*_MOMENTS, "max_exp_avg_sq")),
    "adamp": _native("adamp", _adamp, _MOMENTS, by_row=True),
    "adamw": _native("adamw", _adam, (*_MOMENTS, "max_exp_avg_sq")),
    "bertadam": _native("bertadam", _bertadam, _MOMENTS),
    "lamb": _native("lamb", _lamb, _MOMENTS),
    "rmsprop": _native("rmsprop", _rmsprop, _RMSPROPS),
    "rmsproptf": _native("rmsproptf", _rmsprop, _RMSPROPS),
    "sgd": _native("sgd", _sgd, ("momentum_buffer",)),
}
"""The formulas that our kernels compute, by the registry's name, with their elementwise state in the kernel's order."""


def create_optimizers() -> Optimizers:
    """Create the registry of the CPU."""
    registry = Optimizers()
    register_torch_optimizers(registry, fused=FUSED)
    registry.distrust("sgd", "fused", LOW_PRECISION_SGD, when=_in_low_precision)
    for name, kind in NATIVE.items():
        # "any" for all: `place_runs` gives the parameters in flat memory to kernels that tell parameters apart.
        supports = partial(_refusal, by_row=kind.by_row)
        registry.register(name, "native", kind, priority=_PRIORITY, supports=supports, memory="any", scattered=True)
    return registry


def _in_low_precision(request: Request) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in request.parameters)


def _refusal(request: Request, *, by_row: bool) -> str | None:
    """Return why our kernel cannot serve a request, or None. Builds the kernels if the request has parameters."""
    for switch in ("capturable", "differentiable"):
        if any(request.values(switch, False)):
            return f"the kernel is not {switch}"
    return refusal(request.parameters, by_row=by_row) or unavailable(build=bool(request.parameters))
