"""Products in fp16 on a CPU without units for them: computed in fp32 and rounded.

torch's own kernels add number by number there, and take 5 to 400 times as long as in fp32. fp32 holds every fp16
number, so the results equal fp16 products with sums in fp32. These kernels are below autograd and autocast: gradients,
models in fp16 and compiled code use them, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.precision.dispatcher import Kernel, Maker, replace_kernels
from accelcore_cpu.processor import USUAL, fast_format, fast_setting, with_setting

__all__ = ["install"]

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.mv, _aten.addmv)  # the last two tensors are factors
_OTHERS = (
    _aten.addbmm.default,
    _aten._addmm_activation.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.mkldnn_rnn_layer.default,  # which torch cannot compute in fp16 at all
    _aten.mkldnn_rnn_layer_backward.default,
)
_SMALL = 2**24
"""Operations of a product of 200 x 200: a smaller one costs oneDNN more to start than it gains."""


def install() -> None:
    """Compute products of fp16 tensors on the CPU in fp32 from now on, and round them."""
    replace_kernels("products of fp16", _makers(), "CPU")


def _makers() -> dict[OpOverload, Maker]:
    makers: dict[OpOverload, Maker] = dict.fromkeys(_OTHERS, _rounded)
    for packet in _PRODUCTS:
        makers[packet.default] = _rounded
        makers[packet.out] = _written(packet.default)
    return makers


def _rounded(torchs: Kernel) -> Kernel:
    def kernel(*arguments: Any, **options: Any) -> Any:
        if arguments[0].dtype is not torch.float16:
            return torchs(*arguments, **options)
        with with_setting(_setting(arguments)):
            found = torchs(*map(_widened, arguments), **options)
        return _narrowed(found) if isinstance(found, Tensor) else tuple(map(_narrowed, found))

    return kernel


def _written(operator: OpOverload) -> Maker:
    """Return the maker of a kernel that writes the result of `operator` to `out`, as compiled code calls it."""

    def make(torchs: Kernel) -> Kernel:
        def kernel(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
            if arguments[0].dtype is not torch.float16:
                torchs(*arguments, out=out, **options)
                return out
            found = operator(*arguments, **options)
            return out.resize_(found.shape).copy_(found)

        return kernel

    return make


def _widened(argument: Any) -> Any:
    return argument.float() if isinstance(argument, Tensor) and argument.dtype is torch.float16 else argument


def _narrowed(result: Any) -> Any:
    return result.half() if isinstance(result, Tensor) and result.dtype is torch.float32 else result


def _setting(arguments: tuple[Any, ...]) -> str:
    """Return the quickest of torch's settings under which fp32 products are exact."""
    if fast_format() != "fp32":
        return USUAL
    left, right = [argument for argument in arguments if isinstance(argument, Tensor)][-2:]
    operations = 2 * left.numel() * (right.shape[-1] if right.ndim > 1 else 1)
    return fast_setting() if operations > _SMALL else USUAL
