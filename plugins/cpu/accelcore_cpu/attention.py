"""Attention in the form that is quickest for its length.

torch's flash kernels for the CPU multiply small blocks. In bf16 the backward pass of short sequences takes two to four
times as long that way as by products of whole matrices (`whole_attention`), and with fp32 products through oneDNN
(`fast_fp32`) a block costs more to start than to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.precision.replaced import Kernel, Maker, replace
from accelcore_cpu import whole_attention
from accelcore_cpu.fast_fp32 import with_setting

__all__ = ["choose_form"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Where a form stops being quicker, as measured on a Zen 5.
_LONGEST_WHOLE = 256
_LONGEST_BLOCKS = 768


def choose_form() -> None:
    """From now on, attention on the CPU is computed in its quickest form."""
    replace("attention", _MAKERS, "CPU")


def _forward(torchs: Kernel) -> Kernel:
    def kernel(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        if query.dtype is torch.float16:
            with with_setting("highest"):
                output, sums = torchs(query.float(), key.float(), value.float(), *arguments, **_widened(options))
            return output.half(), sums
        if _by_blocks(query, key):
            with with_setting("highest"):
                return torchs(query, key, value, *arguments, **options)
        return torchs(query, key, value, *arguments, **options)

    return kernel


def _backward(torchs: Kernel) -> Kernel:
    def kernel(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *arguments: Any, **options: Any
    ) -> Any:
        if query.dtype is torch.float16:
            tensors = [each.float() for each in (gradient, query, key, value, output)]
            with with_setting("highest"):
                return tuple(each.half() for each in torchs(*tensors, *arguments, **_widened(options)))
        if _by_blocks(query, key):
            with with_setting("highest"):
                return torchs(gradient, query, key, value, output, *arguments, **options)
        if _fits_whole(query, key, *arguments[1:]):
            return whole_attention.backward(gradient, query, key, value, output, *arguments[2:], **options)
        return torchs(gradient, query, key, value, output, *arguments, **options)

    return kernel


_MAKERS: dict[OpOverload, Maker] = {_FORWARD: _forward, _BACKWARD: _backward}


def _widened(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("attn_mask")
    return options if mask is None or mask.dtype is torch.bool else {**options, "attn_mask": mask.float()}


def _by_blocks(query: Tensor, key: Tensor) -> bool:
    return query.dtype is torch.float32 and max(query.shape[2], key.shape[2]) <= _LONGEST_BLOCKS


def _fits_whole(query: Tensor, key: Tensor, dropout: float, is_causal: bool) -> bool:
    longest = max(query.shape[2], key.shape[2])
    same_heads = query.shape[1] == key.shape[1]
    return query.dtype is torch.bfloat16 and not dropout and longest <= _LONGEST_WHOLE and same_heads
