"""Attention in the form that is quickest for its length.

torch's flash kernels for the CPU multiply small blocks. In bf16 their backward pass takes longer than in fp32 where
sequences are short, and with fp32 products through oneDNN (`fast_fp32`) each block costs more to start than to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.precision.replaced import Kernel, Maker, replace
from accelcore_cpu.fast_fp32 import with_setting

__all__ = ["choose_form"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Where the other form stops being quicker, by measurement on Zen 5 (benchmarks/precision.py has the first).
_LONGEST_WHOLE = 256  # of bf16 in backward, as whole products
_LONGEST_BLOCKS = 768  # of fp32, by torch's usual library


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
        if query.dtype is torch.bfloat16 and _fits_whole(query, key, *arguments[1:]):
            return _whole(gradient, query, key, value, output, arguments[2], **options)
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
    return not dropout and longest <= _LONGEST_WHOLE and query.shape[1] == key.shape[1]


def _whole(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, is_causal: bool,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of attention by products of whole matrices, with the softmax and its gradient in fp32."""
    batch, heads, length, width = query.shape
    scale = width**-0.5 if scale is None else scale
    q, k, v, g, o = (each.reshape(batch * heads, *each.shape[2:]) for each in (query, key, value, gradient, output))
    weights = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale)
    if attn_mask is not None:
        shaped = weights.view(batch, heads, length, -1)
        if attn_mask.dtype is torch.bool:
            shaped.masked_fill_(~attn_mask, -torch.inf)
        else:
            shaped.add_(attn_mask)
    if is_causal:
        future = torch.ones(length, k.shape[1], dtype=torch.bool).triu(1)
        weights.masked_fill_(future, -torch.inf)
    # A row that may look at nothing has weights of 0, as in the forward pass.
    weights = torch.ops.aten._safe_softmax(weights, -1) if attn_mask is not None else torch.softmax(weights, -1)
    of_weights = torch.bmm(g, v.transpose(1, 2)).float()
    of_weights.sub_((g.float() * o.float()).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    low = of_weights.to(q.dtype)
    found = (
        torch.bmm(low, k),
        torch.bmm(low.transpose(1, 2), q),
        torch.bmm(weights.to(q.dtype).transpose(1, 2), g),
    )
    return tuple(_as_torchs(each, batch) for each in found)  # type: ignore[return-value]


def _as_torchs(found: Tensor, batch: int) -> Tensor:
    """Laid out as torch's kernel leaves it, on which compiled code relies: the heads of a position side by side."""
    _, length, width = found.shape
    return found.view(batch, -1, length, width).transpose(1, 2).contiguous().transpose(1, 2)
