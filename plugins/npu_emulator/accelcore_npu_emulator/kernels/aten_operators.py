"""Backward operators and parts of torch's operators that torch_npu registers and the CPU lacks, or computes wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore_npu_emulator.kernels.autograd import backward_of, gradients, rounded_once

if TYPE_CHECKING:
    from collections.abc import Callable

_BCE = torch.ops.aten.binary_cross_entropy_with_logits


def _of_wanted(found: tuple[Tensor | None, ...], mask: list[bool]) -> tuple[Tensor | None, ...]:
    return tuple(gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True))


def _matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]) -> tuple[Tensor | None, ...]:
    return _of_wanted(gradients(torch.matmul, (self, other), grad), mask)


def _kl_div_target_backward(grad: Tensor, input: Tensor, target: Tensor, *options: Any, **keywords: Any) -> Any:
    return gradients(lambda value: torch.ops.aten.kl_div(input, value, *options, **keywords), [target], grad)[0]


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
    return _of_wanted(found, output_mask)


def _gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    # On a processor with AVX-512 the CPU's kernel returns NaN for +inf.
    found: Tensor = torch.ops.aten.gelu(self, approximate=approximate)
    return found.where(self != torch.inf, self)


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    # In low precision the CPU's kernel sums the gradients of weight and bias in that precision.
    single = [None if each is None else each.float() for each in (grad_out, input, mean, rstd, weight, bias)]
    found = torch.ops.aten.native_layer_norm_backward(*single[:2], shape, *single[2:], output_mask)
    dtypes = [input.dtype, *(input.dtype if each is None else each.dtype for each in (weight, bias))]
    return tuple(None if each is None else each.to(dtype) for each, dtype in zip(found, dtypes, strict=True))


def _with_dtype(function: Callable[..., Tensor], tensors: int) -> Callable[..., Tensor]:
    """Wrap a product of low-precision matrices to return a result of higher precision."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        dtype = args[tensors]
        return function(*(value.to(dtype) for value in args[:tensors]), **kwargs)

    return kernel


OPERATORS: dict[str, Callable[..., Any]] = {
    "matmul_backward": _matmul_backward,
    "l1_loss_backward": backward_of(torch.ops.aten.l1_loss, 1),
    "kl_div_backward": backward_of(torch.ops.aten.kl_div, 1),
    "kl_div_target_backward": _kl_div_target_backward,
    "fft_r2c_backward": _fft_r2c_backward,
    "fft_c2r_backward": _fft_c2r_backward,
    "repeat_interleave_backward_int": backward_of(torch.repeat_interleave, 1),
    "repeat_interleave_backward_tensor": backward_of(torch.repeat_interleave, 1),
    "npu_gather_backward": _gather_backward,
    "gelu": _gelu,
    "native_layer_norm_backward": _layer_norm_backward,
    # In low precision the CPU's kernels sum these in that precision.
    "embedding_dense_backward": rounded_once(torch.ops.aten.embedding_dense_backward),
    "convolution_backward": rounded_once(torch.ops.aten.convolution_backward),
    "_conv_depthwise2d": _depthwise,
    "_conv_depthwise2d_backward": _depthwise_backward,
    "binary_cross_entropy_with_logits": rounded_once(_BCE),
    "npu_binary_cross_entropy_with_logits_backward": rounded_once(backward_of(_BCE, 1)),
    "one_hot": lambda self, num_classes=-1: functional.one_hot(self.long(), num_classes).to(self.dtype),
    # A lazy clone would make a copy-on-write storage of the whole address space.
    "_lazy_clone": torch.clone,
    "_masked_scale": lambda self, mask, scale: self * mask * scale,
    "mm.dtype": _with_dtype(torch.mm, 2),
    "bmm.dtype": _with_dtype(torch.bmm, 2),
    "addmm.dtype": _with_dtype(torch.addmm, 3),
    "baddbmm.dtype": _with_dtype(torch.baddbmm, 3),
}
