"""Backward operators and parts of torch's operators that torch_npu registers and the CPU lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore_npu_emulator.kernels.autograd import gradients

if TYPE_CHECKING:
    from collections.abc import Callable

_REDUCTIONS = ("none", "mean", "sum")


def _matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    found = gradients(torch.matmul, (self, other), grad)
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True))


def _l1_loss_backward(grad: Tensor, input: Tensor, target: Tensor, reduction: int) -> Any:
    return gradients(lambda value: torch.ops.aten.l1_loss(value, target, reduction), [input], grad)[0]


def _kl_div_gradient(wanted: int) -> Callable[..., Any]:
    def kernel(grad: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Any:
        def loss(value: Tensor, other: Tensor) -> Tensor:
            return torch.kl_div(value, other, reduction, log_target=log_target)

        return gradients(loss, [input, target], grad)[wanted]

    return kernel


def _fft_r2c_backward(grad: Tensor, dim: list[int], normalization: int, onesided: bool, last_dim_size: int) -> Tensor:
    # The adjoint of the real transform: of a onesided spectrum the other half is zero.
    if onesided:
        missing = last_dim_size - grad.size(dim[-1])
        padding = [0, 0] * (grad.dim() - 1 - dim[-1] % grad.dim()) + [0, missing]
        grad = functional.pad(grad, padding)
    signal: Tensor = torch.ops.aten._fft_c2c(grad, dim, normalization, False).real
    return signal


def _fft_c2r_backward(grad: Tensor, dim: list[int], normalization: int) -> Tensor:
    spectrum: Tensor = torch.ops.aten._fft_r2c(grad, dim, normalization, True)
    last = dim[-1]
    doubled = grad.size(last) - spectrum.size(last)
    # Each frequency but 0 (and the middle one, when there is one) stands for two.
    if doubled > 0:
        spectrum.narrow(last, 1, doubled).mul_(2)
    return spectrum


def _repeat_interleave_int(grad: Tensor, input: Tensor, repeats: int, dim: int | None = None) -> Any:
    return gradients(lambda value: value.repeat_interleave(repeats, dim), [input], grad)[0]


def _repeat_interleave_tensor(grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None = None) -> Any:
    return gradients(lambda value: value.repeat_interleave(repeats, dim), [input], grad)[0]


def _gather_backward(grad: Tensor, self_size: list[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    return grad.new_zeros(self_size).scatter_add(dim, index, grad)


def _depthwise(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    return functional.conv2d(self, weight, bias, stride, padding, dilation, groups=self.size(1))


def _depthwise_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    found = gradients(
        lambda x, w: _depthwise(x, w, kernel_size, None, stride, padding, dilation), (input, weight), grad_output
    )
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, output_mask, strict=True))


def _binary_cross_entropy_backward(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    pos_weight: Tensor | None,
    reduction: int,
) -> Any:
    def loss(value: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(
            value, target, weight, pos_weight=pos_weight, reduction=_REDUCTIONS[reduction]
        )

    return gradients(loss, [input], grad_output)[0]


def _rounded_once(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function of several steps to round once, not to the inputs' low precision after each step."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        dtype = args[0].dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return function(*args, **kwargs)
        single = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
        return function(*single, **kwargs).to(dtype)

    return kernel


def _with_dtype(function: Callable[..., Tensor], tensors: int) -> Callable[..., Tensor]:
    """Wrap a product of low-precision matrices to return a result of higher precision."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        dtype = args[tensors]
        return function(*(value.to(dtype) for value in args[:tensors]), **kwargs)

    return kernel


OPERATORS: dict[str, Callable[..., Any]] = {
    "matmul_backward": _matmul_backward,
    "l1_loss_backward": _l1_loss_backward,
    "kl_div_backward": _kl_div_gradient(0),
    "kl_div_target_backward": _kl_div_gradient(1),
    "fft_r2c_backward": _fft_r2c_backward,
    "fft_c2r_backward": _fft_c2r_backward,
    "repeat_interleave_backward_int": _repeat_interleave_int,
    "repeat_interleave_backward_tensor": _repeat_interleave_tensor,
    "npu_gather_backward": _gather_backward,
    "_conv_depthwise2d": _depthwise,
    "_conv_depthwise2d_backward": _depthwise_backward,
    "binary_cross_entropy_with_logits": _rounded_once(torch.ops.aten.binary_cross_entropy_with_logits),
    "npu_binary_cross_entropy_with_logits_backward": _rounded_once(_binary_cross_entropy_backward),
    "one_hot": lambda self, num_classes=-1: functional.one_hot(self.long(), num_classes).to(self.dtype),
    # A lazy clone would make a copy-on-write storage of the whole address space.
    "_lazy_clone": torch.clone,
    "_masked_scale": lambda self, mask, scale: self * mask * scale,
    "mm.dtype": _with_dtype(torch.mm, 2),
    "bmm.dtype": _with_dtype(torch.bmm, 2),
    "addmm.dtype": _with_dtype(torch.addmm, 3),
    "baddbmm.dtype": _with_dtype(torch.baddbmm, 3),
}
