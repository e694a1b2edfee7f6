"""Optimizers of the NPU: fused over flat memory, torch's fused kernels, torch's loops, formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from accelcore.optim.engine import Request
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import register_torch_optimizers
from accelcore_npu.fused import FUSED

__all__ = ["create_optimizers"]

_PRIORITY = 20  # before torch's kernels, which update one tensor after the other on an NPU
_TORCH_FUSED = ("adamw", "sgd")
_SWITCHES = ("maximize", "capturable", "differentiable")


def create_optimizers() -> Optimizers:
    """Return the optimizer registry of an NPU backend."""
    registry = Optimizers()
    for name, kind in FUSED.items():
        registry.register(name, "npu_fused", kind, priority=_PRIORITY, supports=_supports, memory="flat")
    register_torch_optimizers(registry, fused=_TORCH_FUSED)
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
