"""Optimizers of the NPU: torch_npu's nine fused ones over flat memory, torch's fused kernels, torch's loops, formulas.

Six of the nine use torch_npu's arithmetic, with the options and state of the core's formulas. AdamP, BertAdam and Lamb
use the core's arithmetic. torch_npu's AdamP and Lamb launch operators for each parameter and wait for its norms; its
BertAdam has the bugs that the class `BertAdam` of the core lists.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch_npu import optim

from accelcore.errors import UnsupportedError
from accelcore.optim.engine import Factory, Request
from accelcore.optim.formulas import FLAT_FORMULAS, FORMULAS, Formula
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers

_PRIORITY = 20  # before torch's kernels, which update one tensor after the other on an NPU
_TORCH_FUSED = ("adamw", "sgd")
_SWITCHES = ("maximize", "capturable", "differentiable")


class FusedFormula(Formula):
    """Base of optimizers with a formula's options and torch_npu's arithmetic; put it before the formula's class.

    torch_npu's classes compute an update (`_group_step`) on "combined tensors": parameters, gradients and state of many
    tensors, each in one piece of memory. They build these once, at the first step. They miss gradients that arrive
    later, new gradient tensors and loaded state. The core's runs have the same form and stay up to date, so they
    replace the combined tensors. Options, checks and state are the formula's.
    """

    vendor: type  # torch_npu's class

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        if any(group.get("maximize") for group in self.param_groups):
            raise UnsupportedError(
                "torch_npu's fused optimizers have no maximize, and a group of this one was changed to maximize=True",
                remedy="create the optimizer with maximize=True: then another route is taken",
            )
        self._combine()
        with warnings.catch_warnings():
            # Some of these classes call the deprecated `add_(number, tensor)`.
            warnings.filterwarnings("ignore", "This overload of add", UserWarning)
            for index in range(len(self.param_groups)):
                self.vendor._group_step(self, index)  # type: ignore[attr-defined]  # torch_npu is untyped

    def _combine(self) -> None:
        """Set the lists that torch_npu's `_group_step` reads. They have an entry for each run instead of each dtype."""
        groups = [[value for value in group["params"] if value.grad is not None] for group in self.param_groups]
        self.combined_params_indexed_by_group = groups
        self.combined_grads_indexed_by_group = [[value.grad for value in values] for values in groups]
        self.combined_param_states_indexed_by_group = [
            [self._counted(group, value) for value in values]
            for group, values in zip(self.param_groups, groups, strict=True)
        ]

    def _counted(self, group: dict[str, Any], value: Tensor) -> dict[str, Any]:
        entry = self.entry(group, value)
        # torch_npu computes with the step number on the host.
        return {**entry, "step": int(entry["step"])} if self.counts else entry


def _fused(name: str, vendor: type, **attributes: object) -> type[Formula]:
    return type(vendor.__name__, (FusedFormula, FORMULAS[name]), {"vendor": vendor, **attributes})


FUSED: dict[str, Factory] = {
    "adadelta": _fused("adadelta", optim.NpuFusedAdadelta),
    "adam": _fused("adam", optim.NpuFusedAdam),
    "adamp": FLAT_FORMULAS["adamp"],
    "adamw": _fused("adamw", optim.NpuFusedAdamW),
    "bertadam": FLAT_FORMULAS["bertadam"],
    "lamb": FLAT_FORMULAS["lamb"],
    "rmsprop": _fused("rmsprop", optim.NpuFusedRMSprop),
    "rmsproptf": _fused("rmsproptf", optim.NpuFusedRMSpropTF),
    # Momentum starts as zeros, to which torch_npu adds as to any other.
    "sgd": _fused("sgd", optim.NpuFusedSGD, _momentum_buffer_already_in_state=True),
}
"""Factories of the optimizers that torch_npu fuses, by the registry's name."""


def create_optimizers() -> Optimizers:
    """Return the optimizer registry of an NPU backend."""
    registry = Optimizers()
    for name, kind in FUSED.items():
        registry.register(name, "npu_fused", kind, priority=_PRIORITY, supports=_supports, memory="flat")
    register_torch_optimizers(registry, fused=_TORCH_FUSED)
    registry.refuse(
        optim.NpuFusedOptimizerBase,
        "its first step copies the gradients to memory of its own, and later steps read that memory only",
    )
    return registry


def _supports(request: Request) -> str | None:
    for switch in _SWITCHES:
        if any(request.values(switch, False)):
            return f"torch_npu's fused optimizers have no {switch}"
    numbers = [*request.options.values(), *(value for group in request.groups for value in group.values())]
    if any(isinstance(value, Tensor) for value in numbers):
        return "options must be numbers: the host would wait for the values of tensors"
    if request.name == "adam" and any(request.values("decoupled_weight_decay", False)):
        return "torch_npu's Adam couples weight decay to the gradient; its AdamW does not"
    if request.name == "sgd" and any(request.values("momentum", 0)) and any(request.values("dampening", 0)):
        return "torch_npu decides for all parameters together which step is the first, the one without dampening"
    if any(name not in (None, "float32") for name in request.values("state_dtype", None)):
        return "torch_npu's fused optimizers keep their state in float32"
    others = sorted({str(parameter.dtype) for parameter in request.parameters if parameter.dtype != torch.float32})
    if others:
        # In fp16, eps=1e-8 is 0, and moments are divided by it. torch_npu refuses bf16.
        return f"a parameter is {', '.join(others).replace('torch.', '')}, and the moments are safe in float32 only"
    return None
