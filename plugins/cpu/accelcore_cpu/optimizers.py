"""Optimizers of the CPU: those with a kernel of ours, the options that each passes to it, and the routes of all.

Routes are our kernels, torch's fused kernels and torch's loops.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from accelcore.optim.engine import Request
from accelcore.optim.formulas.adadelta import Adadelta
from accelcore.optim.formulas.adam import Adam, AdamW
from accelcore.optim.formulas.adamp import AdamP
from accelcore.optim.formulas.bertadam import BertAdam
from accelcore.optim.formulas.lamb import Lamb
from accelcore.optim.formulas.rmsprop import RMSprop, RMSpropTF
from accelcore.optim.formulas.sgd import SGD
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.known_faults import LOW_PRECISION_SGD
from accelcore_cpu.native import Native, refusal

FUSED = ("adagrad", "adam", "adamw", "sgd")
"""Optimizers with a fused kernel in torch."""

_PRIORITY = 20

Group = dict[str, Any]
Numbers = tuple[float, ...]


class NativeAdadelta(Native, Adadelta):
    """`Adadelta` by its kernel."""

    kernel, states = "adadelta", ("square_avg", "acc_delta")

    def numbers(self, group: Group) -> Numbers:
        return group["lr"], group["weight_decay"], group["maximize"], group["rho"], group["eps"]


class _Adam(Native):
    kernel, states = "adam", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def numbers(self, group: Group) -> Numbers:
        shared = group["lr"], group["weight_decay"], group["maximize"], *group["betas"], group["eps"]
        return *shared, group["amsgrad"], group["decoupled_weight_decay"]


class NativeAdam(_Adam, Adam):
    """`Adam` by its kernel."""


class NativeAdamW(_Adam, AdamW):
    """`AdamW` by its kernel."""

    kernel = "adamw"


class NativeAdamP(Native, AdamP):
    """`AdamP` by its kernel."""

    kernel, states, by_row = "adamp", ("exp_avg", "exp_avg_sq"), True

    def numbers(self, group: Group) -> Numbers:
        adams = group["lr"], group["weight_decay"], *group["betas"], group["eps"]
        return *adams, group["delta"], group["wd_ratio"], group["nesterov"]


class NativeBertAdam(Native, BertAdam):
    """`BertAdam` by its kernel."""

    kernel, states = "bertadam", ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Group) -> Numbers:
        adams = group["lr"], group["weight_decay"], group["b1"], group["b2"], group["e"], group["max_grad_norm"]
        return *adams, group["warmup"], group["t_total"], _SCHEDULES[group["schedule"]]


class NativeLamb(Native, Lamb):
    """`Lamb` by its kernel."""

    kernel, states = "lamb", ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Group) -> Numbers:
        adams = group["lr"], group["weight_decay"], *group["betas"], group["eps"]
        return *adams, group["adam"], group["use_global_grad_norm"]


class _RMSprop(Native):
    states = ("square_avg", "momentum_buffer", "grad_avg")

    def numbers(self, group: Group) -> Numbers:
        shared = group["lr"], group["weight_decay"], group.get("maximize", False), group["alpha"], group["eps"]
        only_tf = group.get("decoupled_decay", False), group.get("lr_in_momentum", False)
        return *shared, group["momentum"], group["centered"], *only_tf


class NativeRMSprop(_RMSprop, RMSprop):
    """`RMSprop` by its kernel."""

    kernel = "rmsprop"


class NativeRMSpropTF(_RMSprop, RMSpropTF):
    """`RMSpropTF` by its kernel."""

    kernel = "rmsproptf"


class NativeSGD(Native, SGD):
    """`SGD` by its kernel."""

    kernel, states = "sgd", ("momentum_buffer",)

    def numbers(self, group: Group) -> Numbers:
        shared = group["lr"], group["weight_decay"], group["maximize"]
        return *shared, group["momentum"], group["dampening"], group["nesterov"]


NATIVE: dict[str, type[Native]] = {
    kind.kernel: kind
    for kind in (
        NativeAdadelta,
        NativeAdam,
        NativeAdamP,
        NativeAdamW,
        NativeBertAdam,
        NativeLamb,
        NativeRMSprop,
        NativeRMSpropTF,
        NativeSGD,
    )
}
"""By the registry's name."""

# Numbers as in kernels/elementwise.h.
_SCHEDULES = {"warmup_constant": 0, "warmup_cosine": 1, "warmup_linear": 2, "warmup_poly": 3}


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
