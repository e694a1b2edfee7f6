"""Fused cells of LSTM and GRU, which torch's layers use on every device except the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm_state(preactivation: Tensor, cx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    into, forget, cell, out = preactivation.chunk(4, 1)
    into, forget, cell, out = into.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * cx + into * cell
    return out * cy.tanh(), cy, torch.cat([into, forget, cell, out], 1)


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _lstm_state(_biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias), cx)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    into, forget, cell, out = workspace.chunk(4, 1)
    tanh = cy.tanh()
    hidden = torch.zeros_like(cy) if grad_hy is None else grad_hy
    state = hidden * out * (1 - tanh * tanh)
    if grad_cy is not None:
        state = state + grad_cy
    grad_gates = torch.cat(
        [
            state * cell * into * (1 - into),
            state * cx * forget * (1 - forget),
            state * into * (1 - cell * cell),
            hidden * tanh * out * (1 - out),
        ],
        1,
    )
    return grad_gates, state * forget, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from_input = _biased(input_gates, input_bias).chunk(3, 1)
    from_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (from_input[0] + from_hidden[0]).sigmoid()
    update = (from_input[1] + from_hidden[1]).sigmoid()
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    return (hx - new) * update + new, torch.cat([reset, update, new, hx, from_hidden[2]], 1)


def _gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, hx, hidden_new = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    to_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    to_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (to_input.sum(0), to_hidden.sum(0)) if has_bias else (None, None)
    return to_input, to_hidden, grad_hy * update, *biases


OPERATORS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
