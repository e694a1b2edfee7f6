"""Fused optimizer steps: torch_npu's own, and torch's if the CPU kernel has a bug."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import view

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def _fused_sgd_(self: list[Tensor], grads: list[Tensor], momentum_buffer_list: list[Tensor], **options: Any) -> None:
    # torch 2.13's CPU kernel leaves most elements of low-precision parameters as they were (pytorch#191763).
    low = self and self[0].dtype in _LOW_PRECISION
    lists = [[value.float() for value in values] for values in (self, grads, momentum_buffer_list)] if low else None
    if lists is None:
        torch._fused_sgd_(self, grads, momentum_buffer_list, **options)
        return
    torch._fused_sgd_(*lists, **options)
    for targets, values in zip((self, grads, momentum_buffer_list), lists, strict=True):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


OPERATORS: dict[str, Callable[..., Any]] = {"_fused_sgd_": _fused_sgd_}


def _apply_adam(
    variable: Tensor,
    m: Tensor,
    v: Tensor,
    beta1_power: float,
    beta2_power: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    use_locking: bool | None,
    use_nesterov: bool | None,
) -> None:
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    rate = lr * (1 - beta2_power) ** 0.5 / (1 - beta1_power)
    direction = m * beta1 + grad * (1 - beta1) if use_nesterov else m
    variable.sub_(rate * direction / (v.sqrt() + epsilon))


def _apply_adam_w(
    variable: Tensor,
    m: Tensor,
    v: Tensor,
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
) -> None:
    grad = -grad if maximize else grad
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = v
    if amsgrad:
        if max_grad_norm is None:
            raise RuntimeError("EMULATED: npu_apply_adam_w with amsgrad needs max_grad_norm")
        second = max_grad_norm.copy_(torch.maximum(max_grad_norm, v))
    # The powers that come in are those of the step before.
    corrected = m / (1 - beta1_power * beta1)
    denominator = (second / (1 - beta2_power * beta2)).sqrt() + epsilon
    variable.mul_(1 - lr * weight_decay).sub_(lr * corrected / denominator)


def optimizer_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name."""

    def kernel(name: str, update: Callable[..., None]) -> Callable[..., Any]:
        def step(*args: Any, out: list[Tensor]) -> tuple[Tensor, ...]:
            machine.count_launch(name)
            values = [view(arg) if isinstance(arg, Tensor) else arg for arg in args]
            state = [view(tensor) for tensor in out]
            machine.recorder.run(lambda: update(*state, *values))
            return tuple(out)

        return step

    return {
        "npu::npu_apply_adam.out": kernel("npu::npu_apply_adam.out", _apply_adam),
        "npu::npu_apply_adam_w.out": kernel("npu::npu_apply_adam_w.out", _apply_adam_w),
    }
