"""Products in dtypes that the CPU has no instructions for: computed in fp32 and rounded.

In fp16, torch's own kernels add number by number there, and take 5 to 400 times as long as in fp32. fp32 holds every
number of fp16 and bf16, so the results equal low-precision products with sums in fp32. These kernels are below autograd
and autocast: gradients, models in fp16 and compiled code use them, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.precision.dispatcher import Kernel, replace_kernels
from accelcore_cpu.processor import USUAL, fast_format, fast_setting, lacks_onednn, with_setting

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv)  # the last two tensors are factors
_OTHERS = (
    _aten.addbmm.default,
    _aten._addmm_activation.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
)
_LSTM = (_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default)
_SMALL = 2**24  # operations of a product of 200 x 200: a smaller one costs oneDNN more to start than it gains


def install(dtype: torch.dtype) -> None:
    """Compute products of tensors of `dtype` on the CPU in fp32 from now on, and round them, where torch's are slow.

    Also the gradients of convolutions in bf16: without oneDNN torch sums those of many images in bf16.
    """
    lacking = tuple(filter(lacks_onednn, (torch.float16, torch.bfloat16)))
    replace_kernels("LSTMs in low precision", dict.fromkeys(_LSTM, partial(_rounded, lacking)), "CPU")
    if dtype is torch.float16:
        replace_kernels("products of fp16", _products(), "CPU")
    else:
        kernels = {_aten.convolution_backward.default: partial(_rounded, (torch.bfloat16,))}
        replace_kernels("gradients of convolutions in bf16", kernels, "CPU")


def _products() -> dict[OpOverload, Kernel]:
    rounded = partial(_rounded, (torch.float16,))
    kernels: dict[OpOverload, Kernel] = dict.fromkeys(_OTHERS, rounded)
    for packet in _PRODUCTS:
        kernels[packet.default] = rounded
        kernels[packet.out] = partial(_written, packet.default)
    return kernels


def _rounded(dtypes: tuple[torch.dtype, ...], torchs: Kernel, *arguments: Any, **options: Any) -> Any:
    dtype = arguments[0].dtype
    if dtype not in dtypes or _mixed(arguments):  # torch's kernels refuse factors of two dtypes
        return torchs(*arguments, **options)
    with with_setting(_setting(arguments)):
        found = torchs(*(_cast(each, dtype, torch.float32) for each in arguments), **options)
    if isinstance(found, Tensor):
        return _cast(found, torch.float32, dtype)
    return tuple(_cast(each, torch.float32, dtype) for each in found)


def _written(operator: OpOverload, torchs: Kernel, *arguments: Any, out: Tensor, **options: Any) -> Tensor:
    """Write the result of `operator` to `out`, as compiled code calls it."""
    if arguments[0].dtype is not torch.float16 or _mixed((*arguments, out)):
        torchs(*arguments, out=out, **options)
        return out
    found = operator(*arguments, **options)
    return out.resize_(found.shape).copy_(found)


def _mixed(arguments: tuple[Any, ...]) -> bool:
    tensors = (each for each in arguments if isinstance(each, Tensor) and each.is_floating_point())
    return len({each.dtype for each in tensors}) > 1


def _cast(value: Any, found: torch.dtype, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype is found else value


def _setting(arguments: tuple[Any, ...]) -> str:
    """Return the fastest of torch's settings under which fp32 products are exact."""
    if fast_format() != "fp32":
        return USUAL
    left, right = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
    operations = 2 * left.numel() * (right.shape[-1] if right.ndim > 1 else 1)
    return fast_setting() if operations > _SMALL else USUAL
