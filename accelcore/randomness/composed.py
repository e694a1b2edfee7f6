"""Operators that draw in the middle of what they compute, made of others: those that draw and those that compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.randomness.chances import given

__all__ = ["COMPOSED"]

_aten = torch.ops.aten


def _native_dropout(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    scale = torch.empty_like(input).bernoulli_(1 - p)
    kept = scale != 0
    return input * (scale.div_(1 - p) if p < 1 else scale), kept


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    attention = _aten._scaled_dot_product_attention_math
    output: Tensor = attention(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    return output


def _layer_by_layer(operator: OpOverload, *arguments: Any) -> tuple[Tensor, ...]:
    """A recurrent network: each layer by the device's own kernel, dropout between them."""
    values = given(operator, arguments, {})
    data, states, weights, chance = next(iter(values)), values["hx"], values["params"], values["dropout"]
    layers, directions = values["num_layers"], 2 if values["bidirectional"] else 1
    of_each, ended = len(weights) // layers, []
    values |= {"num_layers": 1, "dropout": 0.0}
    for layer in range(layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        values["hx"] = states[rows] if isinstance(states, Tensor) else [state[rows] for state in states]
        values["params"] = weights[layer * of_each : (layer + 1) * of_each]
        values[data], *end = operator(*values.values())
        ended.append(end)
        if layer < layers - 1:
            values[data] = torch.dropout(values[data], chance, train=True)
    return (values[data], *(torch.cat(states) for states in zip(*ended, strict=True)))


COMPOSED: dict[OpOverload, Callable[..., Any]] = {
    _aten.native_dropout.default: _native_dropout,
    _aten.scaled_dot_product_attention.default: _scaled_dot_product_attention,
    **{
        operator: partial(_layer_by_layer, operator)
        for network in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)
        for operator in (network.input, network.data)
    },
}
"""Operators and what they do, where they draw, instead of what they do on a device."""
