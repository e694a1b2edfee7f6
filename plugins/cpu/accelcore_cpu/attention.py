"""Replacement of torch's CPU attention by the form that is fastest for its length.

torch's flash kernels for the CPU multiply small blocks. In bf16 the backward pass of short sequences is two to four
times as fast by products of whole matrices. In fp32 by oneDNN, to start a block costs more than to compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from accelcore.precision.dispatcher import Kernel, replace_kernels
from accelcore_cpu.processor import USUAL, with_setting

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_NO_SETTING = nullcontext()
# The lengths up to which a form is quicker, as measured on a Zen 5.
_LONGEST_WHOLE = 256
_LONGEST_BLOCKS = 768
_AT_A_TIME = 2**17
"""Attention weights that are computed together, in elements: they stay in the cache, and in memory there is."""


def replace_attention() -> None:
    """Compute attention on the CPU in its fastest form from now on."""
    replace_kernels("attention", {_FORWARD: _forward, _BACKWARD: _backward}, "CPU")


def _forward(torchs: Kernel, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
    if query.dtype is torch.float16:
        with with_setting(USUAL):
            output, sums = torchs(query.float(), key.float(), value.float(), *arguments, **_widened(options))
        return output.half(), sums
    with with_setting(USUAL) if _by_blocks(query, key) else _NO_SETTING:
        return torchs(query, key, value, *arguments, **options)


def _backward(
    torchs: Kernel, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *arguments: Any,
    **options: Any,
) -> Any:  # fmt: skip
    if query.dtype is torch.float16:
        tensors = [each.float() for each in (gradient, query, key, value, output)]
        with with_setting(USUAL):
            return tuple(each.half() for each in torchs(*tensors, *arguments, **_widened(options)))
    if _fits_whole(query, key, *arguments[1:]):
        return _whole_backward(gradient, query, key, value, output, *arguments[2:], **options)
    with with_setting(USUAL) if _by_blocks(query, key) else _NO_SETTING:
        return torchs(gradient, query, key, value, output, *arguments, **options)


def _widened(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("attn_mask")
    return options if mask is None or mask.dtype is torch.bool else {**options, "attn_mask": mask.float()}


def _by_blocks(query: Tensor, key: Tensor) -> bool:
    return query.dtype is torch.float32 and max(query.shape[2], key.shape[2]) <= _LONGEST_BLOCKS


def _fits_whole(query: Tensor, key: Tensor, dropout: float, is_causal: bool) -> bool:
    longest = max(query.shape[2], key.shape[2])
    same_heads = query.shape[1] == key.shape[1]
    return query.dtype is torch.bfloat16 and not dropout and longest <= _LONGEST_WHOLE and same_heads


def _whole_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, is_causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value by products of whole matrices, with the softmax in fp32.

    Tensors are (batch, heads, length, width). Gradients are laid out as torch's kernel leaves them, because compiled
    code relies on that.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    of_query, of_key, of_value = _empty(query), _empty(key), _empty(value)
    bias = _bias(query, key, is_causal, attn_mask)
    for part in _parts(query, key):
        weights = _softmax(_scores(query[part], key[part], scale, bias, part), attn_mask)
        of_weights = _times(gradient[part], value[part].transpose(2, 3)).float()
        of_weights.sub_((gradient[part] * output[part]).sum(-1, keepdim=True, dtype=torch.float32))
        low = of_weights.mul_(weights).mul_(scale).to(query.dtype)
        of_query[part] = _times(low, key[part])
        of_key[part] = _times(low.transpose(2, 3), query[part])
        of_value[part] = _times(weights.to(query.dtype).transpose(2, 3), gradient[part])
    return of_query, of_key, of_value


def _parts(query: Tensor, key: Tensor) -> Iterator[slice]:
    batch, heads, length, _ = query.shape
    together = max(1, _AT_A_TIME // max(1, heads * length * key.shape[2]))
    return (slice(first, first + together) for first in range(0, batch, together))


def _empty(like: Tensor) -> Tensor:
    """Return an empty tensor in which the heads of a position are side by side."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _bias(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor | None:
    """Return the bias of the scores, with -inf for hidden positions; None if nothing is hidden."""
    bias = None
    if mask is not None:
        hidden = (
            torch.zeros(mask.shape, device="cpu").masked_fill_(~mask, -torch.inf)
            if mask.dtype is torch.bool
            else mask.float()
        )
        bias = hidden.expand(query.shape[0], *hidden.shape[-3:]) if hidden.ndim == 4 else hidden
    if is_causal:
        future = torch.full((query.shape[2], key.shape[2]), -torch.inf, device="cpu").triu_(1)
        bias = future if bias is None else bias + future
    return bias


def _scores(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, part: slice) -> Tensor:
    scores = _times(query, key.transpose(2, 3)).float().mul_(scale)
    if bias is not None:
        scores.add_(bias[part] if bias.ndim == 4 else bias)
    return scores


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    # If a mask hides everything from a row, its weights are 0.
    return torch.softmax(scores, -1) if mask is None else torch.ops.aten._safe_softmax(scores, -1)


def _times(left: Tensor, right: Tensor) -> Tensor:
    batch, heads = left.shape[:2]
    found = torch.bmm(left.reshape(batch * heads, *left.shape[2:]), right.reshape(batch * heads, *right.shape[2:]))
    return found.view(batch, heads, *found.shape[1:])
