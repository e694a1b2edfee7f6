"""Operators of torch_npu for training: activations, norms, convolutions, fused losses.

Each is its published formula in float32, rounded once to the type of the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore_npu_emulator.kernels.autograd import backward_of, gradients, rounded_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(input.float().pow(2).mean(dims, keepdim=True) + epsilon)
    return (input.float() * rstd * gamma.float()).to(input.dtype), rstd


def _rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dims = tuple(range(-gamma.dim(), 0))
    normal, upstream = input.float() * rstd, dy.float() * gamma.float()
    grad = (upstream - normal * (upstream * normal).mean(dims, keepdim=True)) * rstd
    grad_gamma = (dy.float() * normal).reshape(-1, *gamma.shape).sum(0)
    return grad.to(input.dtype), grad_gamma


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    return *_rms_norm(total, gamma, epsilon), total


def _add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = x1.float() + x2.float()
    out, mean, rstd = torch.native_layer_norm(total, gamma.shape, gamma.float(), beta.float(), epsilon)
    return out.to(x1.dtype), mean, rstd, total.to(x1.dtype)


def _group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels = input.shape[:2]
    area = input.numel() // max(1, batch * channels)
    out, mean, rstd = torch.native_group_norm(input.contiguous(), weight, bias, batch, channels, area, group, eps)
    return functional.silu(out), mean, rstd


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, value = input.chunk(2, dim)
    return (functional.silu(gate.float()) * value.float()).to(input.dtype)


def _rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    if rotate is not None:
        raise NotImplementedError("EMULATED: npu operator npu::npu_rotary_mul is not emulated with rotate=")
    if rotary_mode == "half":
        first, second = input.chunk(2, -1)
        rotated = torch.cat([-second, first], -1)
    else:
        rotated = torch.stack([-input[..., 1::2], input[..., ::2]], -1).flatten(-2)
    return input * r1 + rotated * r2


def _fast_gelu(input: Tensor) -> Tensor:
    return input * torch.sigmoid(1.702 * input)


def _triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)


def _scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    mask = _triangle(x) if fixed_triu_mask else mask
    return (x.float() * scale).masked_fill(mask, -10000.0).softmax(-1).to(x.dtype)


def _scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    mask = _triangle(y) if fixed_triu_mask else mask
    product = y_grad.float() * y.float()
    grad = (product - y.float() * product.sum(-1, keepdim=True)) * scale
    return grad.masked_fill(mask, 0.0).to(y_grad.dtype)


def _cross_entropy_with_logits(input: Tensor, labels: Tensor) -> Tensor:
    return -(labels * input.log_softmax(-1)).sum(-1)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *unsupported: Any,
) -> Tensor:
    if any(unsupported):
        raise NotImplementedError("EMULATED: npu operator npu::npu_cross_entropy_loss is not emulated with zloss")
    return functional.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    ).reshape(-1)


def _cross_entropy_loss(input: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    loss = _cross_entropy(input.float(), target, *options)
    absent = input.new_empty(0)
    return loss.to(input.dtype), input.float().log_softmax(-1).to(input.dtype), absent, absent.float()


def _cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    *options: Any,
) -> Tensor:
    # Log-probabilities are logits, too: those whose softmax is the same.
    def loss(logits: Tensor) -> Tensor:
        return _cross_entropy(logits, target, weight, *options)

    grad: Tensor = gradients(loss, [log_prob.float()], grad_loss.float().reshape(-1))[0]
    return grad.to(log_prob.dtype)


def _linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight, grad.T @ input


@rounded_once
def _convolution_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    spatial = weight.dim() - 2
    return torch.ops.aten.convolution_backward(
        grad_output, input, weight, [weight.size(0)], _spread(stride, spatial), _spread(padding, spatial),
        _spread(dilation, spatial), False, [0] * spatial, groups, output_mask,
    )  # fmt: skip


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    spatial = weight.dim() - 2
    return torch.convolution(
        input, weight, bias, _spread(stride, spatial), _spread(padding, spatial), _spread(dilation, spatial), False,
        [0] * spatial, groups,
    )  # fmt: skip


def _spread(values: Sequence[int], count: int) -> list[int]:
    return list(values) * count if len(values) == 1 else list(values)


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_add_layer_norm": _add_layer_norm,
    "npu_layer_norm_eval": functional.layer_norm,
    "npu_group_norm_silu": _group_norm_silu,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": backward_of(_swiglu, 1),
    "npu_rotary_mul": _rotary_mul,
    "npu_rotary_mul_backward": backward_of(_rotary_mul, 3),
    "npu_gelu": functional.gelu,
    "npu_gelu_backward": backward_of(functional.gelu, 1),
    "fast_gelu": _fast_gelu,
    "npu_fast_gelu": _fast_gelu,
    "npu_fast_gelu_backward": backward_of(_fast_gelu, 1),
    "npu_silu": functional.silu,
    "npu_silu_": lambda x: functional.silu(x, inplace=True),
    "npu_silu_backward": lambda grad, x0, x1: torch.ops.aten.silu_backward(grad, x0),
    "npu_mish": functional.mish,
    "npu_mish_backward": backward_of(functional.mish, 1),
    "npu_scaled_masked_softmax": _scaled_masked_softmax,
    "npu_scaled_masked_softmax_backward": _scaled_masked_softmax_backward,
    "npu_softmax_cross_entropy_with_logits": _cross_entropy_with_logits,
    "npu_softmax_cross_entropy_with_logits_backward": backward_of(_cross_entropy_with_logits, 1),
    "npu_cross_entropy_loss": _cross_entropy_loss,
    "npu_cross_entropy_loss_backward": _cross_entropy_loss_backward,
    "npu_linear": functional.linear,
    "npu_linear_backward": _linear_backward,
    "npu_bmmV2": lambda x, mat2, output_sizes: torch.matmul(x, mat2),
    "npu_conv2d": _convolution,
    "npu_conv2d_backward": _convolution_backward,
    "npu_conv3d": _convolution,
    "npu_conv3d_backward": _convolution_backward,
    "npu_convolution": _convolution,
    "npu_convolution_backward": _convolution_backward,
    "npu_sort_v2": lambda x, dim=-1, descending=False: x.sort(dim, descending)[0],
    "one_": lambda x: x.fill_(1),
}
