"""Conformance of modules that a device computes in one operator: recurrent layers, attention, transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
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
_DIRECTIONS = 3  # in which a value moves for a difference
_DISTANCES = (2.0**-10, 2.0**-13)  # the second one if on the first way is a corner, such as that of relu
_MANY_ROWS = torch.linspace(-20, 20, 65 * 33 * 8).reshape(65, 33, 8).sin()  # also as many units as a kernel has tiles
_FUTURE = torch.full((5, 5), float("-inf")).triu(1)


def _packed(module: Any, rows: Tensor) -> Any:
    lengths = torch.tensor([5, 3, 1] if module.batch_first else [3, 2, 2, 1, 1])  # on the host
    packed, hidden = module(pack_padded_sequence(rows, lengths, module.batch_first))
    return packed.data, hidden


def _with_a_state(module: Any, rows: Tensor) -> Any:
    states = tensors(module(rows)[1])
    return module(rows, tuple(states) if len(states) > 1 else states[0])


def _columns(rows: Tensor) -> Tensor:
    """Return blocks of an image for `nn.Fold`: 4 numbers of each of 20 places."""
    return rows.reshape(-1)[:80].reshape(1, 4, 20)


_MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]] = {
    "Linear of many units": (lambda: nn.Linear(264, 130), lambda m, rows: m(rows.flatten(1)), (_MANY_ROWS,)),
    "Conv2d of many channels": (
        lambda: nn.Conv2d(33, 32, 3, padding=1),
        lambda m, rows: m(rows.transpose(0, 1).reshape(1, 33, 65, 8)),
        (_MANY_ROWS,),
    ),
    "LSTM of many units": (lambda: nn.LSTM(8, 67), lambda m, rows: m(rows)[0], (_MANY_ROWS,)),
    "Embedding of many rows": (
        lambda: nn.Embedding(65, 33),
        lambda m, rows: m((rows[:, 0].abs() * 64).long().clamp(max=64)).sum(0) * rows[:, 0, 0].mean(),
        (_MANY_ROWS,),
    ),
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
    "TransformerEncoderLayer of many units": (
        lambda: nn.TransformerEncoderLayer(264, 3, 130, dropout=0.0),
        lambda m, rows: m(rows.flatten(1)[:, None]),
        (_MANY_ROWS,),
    ),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        lambda m, rows, future: m(rows, rows.flip(1), tgt_mask=future),
        (_ROWS, _FUTURE),
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
            torch.tensor([5, 2, 3]),  # two steps are too few for two equal targets
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


_RECURRENT: dict[str, Callable[..., Any]] = {
    "LSTM": nn.LSTM,
    "LSTM that projects": partial(nn.LSTM, proj_size=4),
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN of relu": partial(nn.RNN, nonlinearity="relu"),
}
_SWITCHES: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True}
_MASK = torch.linspace(-1, 1, 25).reshape(5, 5)


def _attention(rows: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    query, key, value = (each.view(3, 5, 2, 4).transpose(1, 2) for each in (rows, rows.flip(1), rows * rows))
    return functional.scaled_dot_product_attention(query, key, value, mask, dropout_p=0.4, is_causal=causal)


_DRAWN: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[Tensor, ...]]] = {
    **{
        f"{kind} of two layers": (
            partial(make, 8, 5, 2, dropout=0.4, batch_first=True, bidirectional="RNN" in kind),
            lambda m, rows: m(rows),
            (_ROWS,),
        )
        for kind, make in _RECURRENT.items()
    },
    **{
        f"{drop.__name__}": (partial(drop, 0.4), lambda m, x: m(x[:, None]), (_VOLUMES,))
        for drop in (nn.Dropout, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    },
    "Dropout1d": (lambda: nn.Dropout1d(0.4), lambda m, rows: m(rows), (_ROWS,)),
    "Dropout2d": (lambda: nn.Dropout2d(0.4), lambda m, x: m(x), (_VOLUMES,)),
    "RReLU": (nn.RReLU, lambda m, rows: m(rows), (_ROWS,)),
    "Gumbel's softmax": (nn.Identity, lambda m, rows: functional.gumbel_softmax(rows, 1.5), (_ROWS,)),
    "attention": (nn.Identity, lambda m, rows: _attention(rows), (_ROWS,)),
    "attention that is causal": (nn.Identity, lambda m, rows: _attention(rows, causal=True), (_ROWS,)),
    "attention with a mask": (nn.Identity, lambda m, rows, mask: _attention(rows, mask), (_ROWS, _MASK)),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True),
        lambda m, rows: m(rows, rows.flip(1), rows)[0],
        (_ROWS,),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True, activation="gelu"),
        lambda m, rows: m(rows),
        (_ROWS,),
    ),
}
"""Modules that draw random numbers in training, how to call them, and with what."""


def _unchanged(parameter: Tensor) -> None:
    pass


_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "": _unchanged,
    " after a change in place": lambda parameter: parameter.mul_(0.5),
    " after a change by .data": lambda parameter: parameter.data.mul_(1.5),
    " after another .data": lambda parameter: setattr(parameter, "data", parameter.data * 0.5),
}
"""Changes of a module's parameters between two calls in evaluation."""


class ModuleTests:
    """The part of `TestOperators` that is about modules."""

    @pytest.mark.parametrize("name", _MODULES)
    def test_module(self, accel: Backend, name: str) -> None:
        """Outputs in training and in evaluation, and gradients, are those of float64 on the CPU.

        They are those of the parameters as they are, however these were changed since the last call.
        """
        _compare(accel, name, *_MODULES[name], again=True)

    @pytest.mark.parametrize("name", _RECURRENT)
    def test_recurrent(self, accel: Backend, name: str) -> None:
        """Recurrent layers of all combinations of options are those of float64 on the CPU, also of packed rows."""
        for chosen in product((False, True), repeat=len(_SWITCHES)):
            options = {key: _SWITCHES[key] for key, on in zip(_SWITCHES, chosen, strict=True) if on}
            for call in (lambda module, rows: module(rows), _packed, _with_a_state):
                _compare(accel, f"{name} with {options}", partial(_RECURRENT[name], 8, 5, **options), call, (_ROWS,))
        many = partial(_RECURRENT[name], 8, 67, bidirectional=True)
        _compare(accel, f"{name} of many units", many, lambda module, rows: module(rows), (_MANY_ROWS,))

    @pytest.mark.parametrize("name", _DRAWN)
    def test_gradients_of_draws(self, accel: Backend, name: str) -> None:
        """Gradients of what draws random numbers are differences of its results after the same seed.

        In evaluation, modules draw nothing, and give the results of float64 on the CPU.
        """
        make, call, given = _DRAWN[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            module = make().to(accel.device)
        inputs = [_moved(each, accel.device, torch.float32) for each in given]
        generator = torch.Generator().manual_seed(5)

        def total(seed: int = 31) -> Tensor:
            accel.runtime.seed(seed)
            output = torch.cat([each.cpu().double().flatten() for each in tensors(call(module, *inputs))])
            return output @ torch.linspace(0.5, 2, len(output)).double()

        with accel.precision.fp32("ieee"):
            try:
                loss = total()
            except Exception as raised:
                if not is_refusal(raised):
                    raise
                refused(f"{name}: {type(raised).__name__}: {raised}")
            assert not torch.equal(total(32), loss), f"{name} draws the same numbers after another seed"
            leaves = {**dict(module.named_parameters()), **{f"input {n}": leaf for n, leaf in enumerate(inputs)}}
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            largest = max(float(each.norm()) for each in gradients)
            for (what, leaf), gradient in zip(leaves.items(), gradients, strict=True):
                for _ in range(_DIRECTIONS):
                    way = torch.randn(leaf.shape, generator=generator).to(leaf)
                    found, limit = float((gradient * way).sum()), 0.03 * float(gradient.norm()) + 0.003 * largest
                    for far in _DISTANCES:
                        slope = _slope(total, leaf, way, far)
                        if abs(found - slope) < limit:
                            break
                    else:
                        pytest.fail(f"{name}: the gradient of {what} is wrong: {found:.4g}, not {slope:.4g}")
            if not isinstance(module, nn.Identity):  # functions draw in evaluation, too
                exact = copy.deepcopy(module).cpu().double().eval()
                right = tensors(call(exact, *(_moved(each, torch.device("cpu"), torch.float64) for each in given)))
                for one, other in zip(tensors(call(module.eval(), *inputs)), right, strict=True):
                    assert error(one, other) < 1e-4, f"{name}: a result in evaluation is wrong"


def _slope(total: Callable[[], Tensor], leaf: Tensor, way: Tensor, far: float) -> float:
    """Return the slope along one way, by values that lie so far apart; leave the leaf as it was."""
    start, found = leaf.detach().clone(), list[float]()
    with torch.no_grad():
        for distance in (far, -far):
            leaf.copy_(start + distance * way)
            found.append(float(total()))
        leaf.copy_(start)
    return (found[0] - found[1]) / (2 * far)


def _compare(
    accel: Backend,
    name: str,
    make: Callable[[], nn.Module],
    call: Callable[..., Any],
    given: tuple[Tensor, ...],
    *,
    again: bool = False,
) -> None:
    """Compare a module with one in float64; with `again`, also in evaluation after each change of its parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        exact: nn.Module = make().double()
    module = copy.deepcopy(exact).float().to(accel.device)
    with accel.precision.fp32("ieee"):
        try:
            found = _results(module, call, [_moved(tensor, accel.device, torch.float32) for tensor in given], again)
        except Exception as raised:
            if not is_refusal(raised):
                raise
            refused(f"{name}: {type(raised).__name__}: {raised}")
    expected = _results(exact, call, [_moved(tensor, torch.device("cpu"), torch.float64) for tensor in given], again)
    assert found.keys() == expected.keys()
    for what, tensor in expected.items():
        assert error(found[what], tensor) < 1e-4, f"{name}: the {what} is wrong"


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    floating = tensor.is_floating_point()
    return tensor.to(device, dtype if floating else tensor.dtype, copy=True).requires_grad_(floating)


def _results(module: nn.Module, call: Callable[..., Any], given: list[Tensor], again: bool) -> dict[str, Tensor]:
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
    for when, change in _CHANGES.items() if again else [("", _unchanged)]:
        with torch.no_grad():
            for parameter in module.parameters():
                change(parameter)
        for quiet in (torch.no_grad, torch.inference_mode) if again else (torch.no_grad,):
            with quiet():
                outputs = tensors(call(module, *given))
            found |= {
                f"output {number} in evaluation by {quiet.__name__}{when}": output
                for number, output in enumerate(outputs)
            }
    return found
