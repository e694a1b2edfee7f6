"""The backward pass of attention by products of whole matrices, its softmax in fp32: for short sequences.

Tensors are (batch, heads, length, width). A few sequences are computed at a time: what they need then stays in the
cache, and in memory that the process has. Gradients are laid out as torch's kernel leaves them, on which compiled code
relies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["backward"]

_AT_A_TIME = 2**17
"""Elements of weights."""


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, is_causal: bool, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
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
    """The heads of a position side by side."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _bias(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None) -> Tensor | None:
    """What is added to the scores; -inf where nothing may be seen."""
    bias = None
    if mask is not None:
        hidden = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf) if mask.dtype is torch.bool else mask.float()
        bias = hidden.expand(query.shape[0], *hidden.shape[-3:]) if hidden.ndim == 4 else hidden
    if is_causal:
        future = torch.full((query.shape[2], key.shape[2]), -torch.inf).triu_(1)
        bias = future if bias is None else bias + future
    return bias


def _scores(query: Tensor, key: Tensor, scale: float, bias: Tensor | None, part: slice) -> Tensor:
    scores = _times(query, key.transpose(2, 3)).float().mul_(scale)
    if bias is not None:
        scores.add_(bias[part] if bias.ndim == 4 else bias)
    return scores


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    # Where a mask hides everything from a row, its weights are 0.
    return torch.softmax(scores, -1) if mask is None else torch.ops.aten._safe_softmax(scores, -1)


def _times(left: Tensor, right: Tensor) -> Tensor:
    batch, heads = left.shape[:2]
    found = torch.bmm(left.reshape(batch * heads, *left.shape[2:]), right.reshape(batch * heads, *right.shape[2:]))
    return found.view(batch, heads, *found.shape[1:])
