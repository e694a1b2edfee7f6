"""Conformance of modules that a device computes in one operator: recurrent layers, attention, transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.found import is_refusal
from accelcore.testing.support.layouts import tensors
from accelcore.testing.support.oracles import error

_PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False, True] * 2 + [True]])
_ROWS = torch.linspace(-1, 1, 120).reshape(3, 5, 8).sin()
_HIDDEN = torch.linspace(-0.5, 1, 24).reshape(2, 3, 4)
_VOLUMES = torch.linspace(-1, 2, 240).reshape(2, 2, 5, 12).sin()[..., :7]
_FUTURE = torch.full((5, 5), float("-inf")).triu(1)


def _packed(module: Any, rows: Tensor) -> Any:
    lengths = torch.tensor([5, 3, 1])  # on the host
    packed, hidden = module(pack_padded_sequence(rows, lengths, batch_first=True))
    return packed.data, hidden


def _columns(rows: Tensor) -> Tensor:
    """Return blocks of an image for `nn.Fold`: 4 numbers of each of 20 places."""
    return rows.reshape(-1)[:80].reshape(1, 4, 20)


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
    "LSTM both ways in two layers": (
        lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True),
        lambda m, rows: m(rows),
        (_ROWS,),
    ),
    "GRU both ways": (lambda: nn.GRU(8, 4, bidirectional=True), lambda m, rows: m(rows), (_ROWS,)),
    "RNN of relu both ways": (
        lambda: nn.RNN(8, 4, 2, nonlinearity="relu", bidirectional=True),
        lambda m, rows: m(rows),
        (_ROWS,),
    ),
    "GRUCell": (lambda: nn.GRUCell(8, 4), lambda m, rows, hidden: m(rows[:, 0], hidden[0]), (_ROWS, _HIDDEN)),
    "RNNCell": (lambda: nn.RNNCell(8, 4), lambda m, rows, hidden: m(rows[:, 0], hidden[0]), (_ROWS, _HIDDEN)),
    "MultiheadAttention of other keys": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=3, add_bias_kv=True, add_zero_attn=True),
        lambda m, rows, hidden: m(rows, rows[..., :4] + hidden.sum(), rows[..., 4:7], average_attn_weights=False),
        (_ROWS, _HIDDEN),
    ),
    "Conv1d in a circle": (
        lambda: nn.Conv1d(5, 4, 3, dilation=2, padding="same", padding_mode="circular"),
        lambda m, rows: m(rows),
        (_ROWS,),
    ),
    "Conv3d": (lambda: nn.Conv3d(1, 2, (2, 3, 1), (1, 2, 1), 1, groups=1), lambda m, x: m(x[:, None]), (_VOLUMES,)),
    "ConvTranspose2d with more behind it": (
        lambda: nn.ConvTranspose2d(2, 4, 3, 3, 1, output_padding=(1, 2), groups=2, dilation=2),
        lambda m, x: m(x),
        (_VOLUMES,),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(1, 2, 2, 2), lambda m, x: m(x[:, None]), (_VOLUMES,)),
    "BatchNorm3d of all batches": (
        lambda: nn.BatchNorm3d(2, momentum=None),
        lambda m, x: m(x[:, :, None]),
        (_VOLUMES,),
    ),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda m, rows: m(rows), (_ROWS,)),
    "MaxPool2d and MaxUnpool2d": (
        lambda: nn.MaxPool2d(2, ceil_mode=True, return_indices=True),
        lambda m, x: functional.max_unpool2d(m(x)[0], m(x)[1], (2, 2), output_size=x.shape[2:]),
        (_VOLUMES,),
    ),
    "AdaptiveMaxPool2d of unequal parts": (lambda: nn.AdaptiveMaxPool2d((2, 3)), lambda m, x: m(x), (_VOLUMES,)),
    "AvgPool3d": (
        lambda: nn.AvgPool3d(2, 1, 1, ceil_mode=True, divisor_override=3),
        lambda m, x: m(x[:, None]),
        (_VOLUMES,),
    ),
    "Upsample of volumes": (
        lambda: nn.Upsample(scale_factor=1.7, mode="trilinear", align_corners=True),
        lambda m, x: m(x[:, None]),
        (_VOLUMES,),
    ),
    "ReplicationPad3d": (lambda: nn.ReplicationPad3d((1, 2, 0, 1, 1, 1)), lambda m, x: m(x[:, None]), (_VOLUMES,)),
    "Fold": (lambda: nn.Fold((3, 4), 2, padding=1), lambda m, rows: m(_columns(rows)), (_ROWS,)),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3), lambda m, rows: m(rows, rows.flip(-1)), (_ROWS,)),
    "CTCLoss": (
        lambda: nn.CTCLoss(blank=2, zero_infinity=True),
        lambda m, rows: m(
            rows.transpose(0, 1).log_softmax(-1),
            torch.tensor([[0, 1, 1], [3, 3, 0], [4, 0, 0]], device=rows.device),
            torch.tensor([5, 4, 3]),
            torch.tensor([3, 2, 0]),
        ),
        (_ROWS,),
    ),
    "losses of pairs": (
        nn.Identity,
        lambda m, rows: [
            functional.poisson_nll_loss(rows, rows.detach().abs()),
            functional.gaussian_nll_loss(rows, rows.flip(0), rows.square() + 1, full=True),
            functional.triplet_margin_loss(rows[0], rows[1], rows[2], p=1.5, swap=True),
            functional.binary_cross_entropy(rows.sigmoid(), rows.detach().sigmoid(), weight=rows.detach().abs()),
            functional.smooth_l1_loss(rows, rows.flip(0), beta=0.3, reduction="sum"),
        ],
        (_ROWS,),
    ),
    "EmbeddingBag by weights": (
        lambda: nn.EmbeddingBag(8, 4, mode="sum", include_last_offset=True),
        lambda m, rows: m(
            (rows[0, 0].abs() * 8).long().clamp(max=7),
            torch.tensor([0, 3, 3, 8], device=rows.device),
            per_sample_weights=rows[1, 1],
        ),
        (_ROWS,),
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
            try:
                found = _results(module, call, [_moved(tensor, accel.device, torch.float32) for tensor in given])
            except Exception as raised:
                if not is_refusal(raised):
                    raise
                refused(f"{name}: {type(raised).__name__}: {raised}")
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
