"""Conformance of modules that a device computes in one operator: recurrent layers, attention, transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from accelcore import Backend
from accelcore.testing.support.layouts import tensors
from accelcore.testing.support.oracles import error

_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False, True] * 2 + [True]])
_ROWS = torch.linspace(-1, 1, 120).reshape(3, 5, 8).sin()
_HIDDEN = torch.linspace(-0.5, 1, 24).reshape(2, 3, 4)
_FUTURE = torch.full((5, 5), float("-inf")).triu(1)


def _packed(module: Any, rows: Tensor) -> Any:
    lengths = torch.tensor([5, 3, 1])  # on the host
    packed, hidden = module(pack_padded_sequence(rows, lengths, batch_first=True))
    return packed.data, hidden


_MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]] = {
    "LSTM": (lambda: nn.LSTM(8, 4), lambda m, rows: m(rows), (_ROWS,)),
    "LSTM with a state": (
        lambda: nn.LSTM(8, 4, 2, batch_first=True),
        lambda m, rows, hidden: m(rows, (hidden, hidden.flip(0))),
        (_ROWS, _HIDDEN),
    ),
    "LSTM both ways": (
        lambda: nn.LSTM(8, 4, bidirectional=True, batch_first=True, bias=False),
        lambda m, rows: m(rows),
        (_ROWS,),
    ),
    "LSTM of packed rows": (lambda: nn.LSTM(8, 4, batch_first=True), _packed, (_ROWS,)),
    "GRU with a state": (lambda: nn.GRU(8, 4, 2, batch_first=True), lambda m, *given: m(*given), (_ROWS, _HIDDEN)),
    "RNN with a state": (lambda: nn.RNN(8, 4, 2, batch_first=True), lambda m, *given: m(*given), (_ROWS, _HIDDEN)),
    "LSTMCell": (lambda: nn.LSTMCell(8, 4), lambda m, rows: m(rows[0]), (_ROWS,)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, rows, padding: m(rows, rows, rows, key_padding_mask=padding, need_weights=False),
        (_ROWS, _PADDING),
    ),
    "MultiheadAttention and its weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, rows, future: m(rows, rows.flip(0), rows, attn_mask=future),
        (_ROWS, _FUTURE),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, rows, padding: m(rows, src_key_padding_mask=padding)[~padding],
        (_ROWS, _PADDING),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        lambda m, rows, future: m(rows, rows.flip(1), tgt_mask=future),
        (_ROWS, _FUTURE),
    ),
    "EmbeddingBag": (
        lambda: nn.EmbeddingBag(8, 4, mode="mean", padding_idx=1),
        lambda m, rows: m((rows[0].abs() * 8).long().clamp(max=7)),
        (_ROWS,),
    ),
}


class ModuleTests:
    """The part of `TestOperators` that is about modules."""

    @pytest.mark.parametrize("name", _MODULES)
    def test_module(self, accel: Backend, name: str) -> None:
        """Outputs in training and in evaluation, and gradients, are those of float64 on the CPU."""
        make, call, given = _MODULES[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            exact: nn.Module = make().double()
        module = copy.deepcopy(exact).float().to(accel.device)
        with accel.precision.fp32("ieee"):
            found = _results(module, call, [_moved(tensor, accel.device, torch.float32) for tensor in given])
        expected = _results(exact, call, [_moved(tensor, torch.device("cpu"), torch.float64) for tensor in given])
        assert found.keys() == expected.keys()
        for what, tensor in expected.items():
            assert error(found[what], tensor) < 1e-4, f"{name}: the {what} is wrong"


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    floating = tensor.is_floating_point()
    return tensor.to(device, dtype if floating else tensor.dtype, copy=True).requires_grad_(floating)


def _results(module: nn.Module, call: Callable[..., Any], given: list[Tensor]) -> dict[str, Tensor]:
    outputs = tensors(call(module, *given))
    leaves = {**dict(module.named_parameters()), **{f"input {number}": leaf for number, leaf in enumerate(given)}}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and not bool(leaf.isinf().any())}
    weights = [torch.linspace(0.5, 2, output.numel()).reshape(output.shape).to(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
    found = {f"output {number}": output for number, output in enumerate(outputs)}
    found |= {
        f"gradient of {name}": gradient
        for name, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    }
    module.eval()
    with torch.no_grad():
        again = tensors(call(module, *given))
    return found | {f"output {number} in evaluation": output for number, output in enumerate(again)}
