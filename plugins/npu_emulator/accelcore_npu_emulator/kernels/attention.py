"""Fused attention operators of torch_npu and their backwards, which also compute torch's own attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.autograd import gradients
from accelcore_npu_emulator.kernels.generators import host_generator
from accelcore_npu_emulator.kernels.host_memory import CPU, current_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_FULL_MASKS, _CAUSAL_TOP_LEFT, _CAUSAL_BOTTOM_RIGHT, _BAND = (0, 1), 2, 3, 4
# Softmax statistics repeat along a last dimension of eight, the device's vector block.
_BLOCK = 8
_ABSENT = ("padding_mask", "query_rope", "key_rope", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sink")


@dataclass(frozen=True)
class _Problem:
    """Options of one attention, without query, key and value."""

    heads: int
    layout: str
    bias: Tensor | None
    mask: Tensor | None
    scale: float
    keep: float
    sparse_mode: int
    before: int
    after: int
    seed: int
    offset: int


def _problem(heads: int, layout: str, options: dict[str, Any], seed: int, offset: int) -> _Problem:
    unknown = [name for name in _ABSENT if options.get(name) is not None]
    if layout not in ("BNSD", "BSND", "BSH", "SBH") or options.get("sparse_mode", 0) > _BAND or unknown:
        what = ", ".join(unknown) or f"input_layout={layout}, sparse_mode={options.get('sparse_mode', 0)}"
        raise NotImplementedError(f"EMULATED: npu operator npu::npu_fusion_attention is not emulated with {what}")
    return _Problem(
        heads=heads,
        layout=layout,
        bias=options.get("pse"),
        mask=options.get("atten_mask"),
        scale=options.get("scale", options.get("scale_value", 1.0)),
        keep=options.get("keep_prob", 1.0),
        sparse_mode=options.get("sparse_mode", 0),
        before=options.get("pre_tockens", options.get("pre_tokens", 2147483647)),
        after=options.get("next_tockens", options.get("next_tokens", 2147483647)),
        seed=seed,
        offset=offset,
    )


def _by_heads(value: Tensor, layout: str, width: int | None, heads: int) -> Tensor:
    """Return the value as (batch, heads, sequence, width of a head) in float32."""
    if layout == "SBH":
        value = value.transpose(0, 1)
    if layout in ("SBH", "BSH"):
        value = value.reshape(*value.shape[:2], *((heads, -1) if width is None else (-1, width)))
    return (value if layout == "BNSD" else value.transpose(1, 2)).float()


def _as_layout(value: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return value
    value = value.transpose(1, 2)
    if layout == "BSND":
        return value
    value = value.flatten(2)
    return value.transpose(0, 1) if layout == "SBH" else value


def _masked(problem: _Problem, queries: int, keys: int) -> Tensor | None:
    """Return a mask that is True if a key is hidden from a query; None without a mask."""
    if problem.sparse_mode in _FULL_MASKS:
        return None if problem.mask is None else problem.mask.bool()
    if problem.mask is None:
        raise RuntimeError(f"EMULATED: npu_fusion_attention needs an atten_mask with sparse_mode={problem.sparse_mode}")
    distance = torch.arange(keys, device=CPU)[None, :] - torch.arange(queries, device=CPU)[:, None]
    if problem.sparse_mode == _CAUSAL_TOP_LEFT:
        return distance > 0
    distance = distance - (keys - queries)
    if problem.sparse_mode == _CAUSAL_BOTTOM_RIGHT:
        return distance > 0
    return (distance > problem.after) | (distance < -problem.before)


def _attend(query: Tensor, key: Tensor, value: Tensor, problem: _Problem) -> tuple[Tensor, Tensor, Tensor]:
    q = _by_heads(query, problem.layout, None, problem.heads)
    k, v = (_by_heads(t, problem.layout, q.size(-1), problem.heads) for t in (key, value))
    if k.size(1) != problem.heads:  # grouped queries
        k, v = (t.repeat_interleave(problem.heads // t.size(1), 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2)
    if problem.bias is not None:
        scores = scores + problem.bias.float()
    scores = scores * problem.scale
    hidden = _masked(problem, q.size(2), k.size(2))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest.isinf(), 0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    # A query from which every key is hidden attends to nothing.
    attention = weights / total.masked_fill(total == 0, 1.0)
    if problem.keep < 1:
        chance = torch.rand(attention.shape, generator=host_generator(problem.seed, problem.offset), device=CPU)
        attention = attention * (chance < problem.keep) / problem.keep
    out = _as_layout((attention @ v).to(query.dtype), problem.layout)
    return out, largest.detach(), total.detach()


def attention_operators(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return torch_npu's fused attention by operator name, as functions of host tensors."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, args: Any, options: dict[str, Any]
    ) -> Any:
        options |= dict(zip(_POSITIONAL, args, strict=False))
        seed, offset = 0, 0
        if options.get("keep_prob", 1.0) < 1:
            seed, offset = machine.generators.draw(current_device(), None)
        problem = _problem(heads, layout, options, seed, offset)
        out, largest, total = _attend(query, key, value, problem)
        statistics = (t.expand(*t.shape[:-1], _BLOCK).contiguous() for t in (largest, total))
        return problem, out, *statistics, query.new_empty(0)

    def forward(
        query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *args: Any, **options: Any
    ) -> Any:
        problem, *results = attend(query, key, value, head_num, input_layout, args, options)
        dropped = query.size(0) * head_num * results[1].size(2) * _keys(key, input_layout) if problem.keep < 1 else 0
        return *results, problem.seed, problem.offset, dropped

    def forward_v3(
        query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *args: Any, **options: Any
    ) -> Any:
        problem, *results = attend(query, key, value, head_num, input_layout, args, options)
        return *results, *(torch.tensor([n], device=CPU) for n in (problem.seed, problem.offset))

    return {
        "npu_fusion_attention": forward,
        "npu_fusion_attention_v2": forward,
        "npu_fusion_attention_v3": forward_v3,
        "npu_fusion_attention_grad": _backward,
        "npu_fusion_attention_grad_v2": _backward_with_rope,
        "npu_fusion_attention_grad_v3": _backward,
    }


def _backward(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
) -> Any:
    options = {name: value for name, value in options.items() if value is not None}
    # In the third version these are tensors, so that a graph can draw anew at each replay.
    problem = _problem(head_num, input_layout, options, *(int(options.get(n, 0)) for n in ("seed", "offset")))
    found = gradients(lambda q, k, v: _attend(q, k, v, problem)[0], (query, key, value), dy)
    # The device makes room for the gradient of the bias, where there is one, and does not compute it.
    bias = None if problem.bias is None else torch.full_like(problem.bias, math.nan)
    return *found, bias, key.new_empty(0, dtype=torch.float32)


def _backward_with_rope(*args: Any, **options: Any) -> Any:
    *found, sink = _backward(*args, **options)
    return *found, None, None, sink


_POSITIONAL = (
    "pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix",
    "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout", "sink",
    "dropout_mask", "seed", "offset",
)  # fmt: skip


def _keys(key: Tensor, layout: str) -> int:
    return key.size({"BNSD": 2, "BSND": 1, "BSH": 1, "SBH": 0}[layout])
