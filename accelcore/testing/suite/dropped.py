"""Conformance of dropout inside of operators: how much it drops, and by how much it rescales the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.found import is_refusal
from accelcore.testing.support.oracles import eps
from accelcore.testing.support.statistics import is_off

_WIDTH = 32
_ALPHA = -1.7580993408473766  # where SELU saturates
_CHANNELS: dict[type[nn.Module], int] = {nn.Dropout2d: 2, nn.Dropout3d: 1, nn.FeatureAlphaDropout: 2}
"""Those that drop whole channels, and the dimension at which one begins."""
_MASK = torch.linspace(-1, 1, _WIDTH**2).reshape(_WIDTH, _WIDTH).mul(8).round().div(8)
_FUTURE = torch.full((_WIDTH, _WIDTH), -math.inf).triu(1)

Shares = list[tuple[Tensor, float]]
"""Numbers that are 0 if they were dropped, else 1; and how many of them are to be kept."""


def _rows(device: torch.device, *shape: int) -> Tensor:
    """Return multiples of 1/8 from -1 to 1, which are exact in every dtype."""
    generator = torch.Generator().manual_seed(8)
    return (torch.randint(-8, 9, (*shape, _WIDTH), generator=generator) / 8).to(device)


def _weights(output: Tensor, query: Tensor, key: Tensor, bias: Tensor | None, rate: float) -> Shares:
    """Divide the weights of attention, which its output is for an identity as value, by those without dropout."""
    scores = query.cpu().double() @ key.cpu().double().transpose(-2, -1) / math.sqrt(_WIDTH)
    exact = torch.softmax(scores if bias is None else scores + bias.double(), -1)
    seen = (exact > 0).expand_as(output)
    ratios = output * ((1 - rate) / exact.clamp(min=1e-9)).to(output.device, torch.float32)
    return [(ratios[seen.to(output.device)], 1 - rate)]


def _attention(device: torch.device, rate: float, bias: Tensor | None = None, *, causal: bool = False) -> Shares:
    query, key = _rows(device, 4, 4, _WIDTH), _rows(device, 4, 4, _WIDTH).flip(0)
    value = torch.eye(_WIDTH, device=device).expand(4, 4, -1, -1)
    mask = None if bias is None else bias.to(device)
    output = functional.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate, is_causal=causal)
    return _weights(output, query, key, _FUTURE if causal else bias, rate)


def _multihead(device: torch.device, rate: float, *, need_weights: bool) -> Shares:
    module = nn.MultiheadAttention(_WIDTH, 1, dropout=rate, batch_first=True)
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(_WIDTH).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(_WIDTH))
    query, key = _rows(device, 16, _WIDTH), _rows(device, 16, _WIDTH).flip(0)
    value = torch.eye(_WIDTH, device=device).expand(16, -1, -1)
    return _weights(module.to(device)(query, key, value, need_weights=need_weights)[0], query, key, None, rate)


def _encoder(device: torch.device, rate: float) -> Shares:
    """Return what is dropped of attention's output, which is 8 here, and twice of the linear layers', which is 1."""
    layer = nn.TransformerEncoderLayer(_WIDTH, 2, _WIDTH, dropout=rate, batch_first=True, norm_first=True)
    parts = (layer.self_attn.out_proj, 0.0, 8.0), (layer.linear1, 0.0, 1.0), (layer.linear2, 1.0, 0.0)
    with torch.no_grad():
        for linear, diagonal, bias in parts:
            linear.weight.copy_(diagonal * torch.eye(_WIDTH))
            linear.bias.fill_(bias)
    output = layer.to(device)(torch.zeros(16, _WIDTH, _WIDTH, device=device)) * (1 - rate)
    of_attention = output > 4
    return [(of_attention, 1 - rate), ((output - 8 * of_attention) * (1 - rate), (1 - rate) ** 2)]


def _recurrent(make: Callable[..., Any], device: torch.device, rate: float) -> Shares:
    """Return what is dropped between two layers: the first one gives ones, or less, to each unit of the second."""
    module = make(_WIDTH, _WIDTH, 2, dropout=rate)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.zero_()
            if name == "bias_ih_l0":
                parameter.fill_(1.0)
            if name == "weight_ih_l1":
                parameter.copy_(torch.eye(_WIDTH).repeat(len(parameter) // _WIDTH, 1))
    exact = copy.deepcopy(module).double()
    exact.dropout = 0.0
    with torch.no_grad():
        exact.weight_ih_l1 /= 1 - rate
        expected = exact(torch.zeros(1, 1, _WIDTH).double())[0]
    first = module.to(device)(torch.zeros(2, 256, _WIDTH, device=device))[0][0]
    return [(first / float(expected[0, 0, 0]), 1 - rate)]


def _first_of_channels(drop: type[nn.Module], device: torch.device, rate: float) -> Tensor:
    """Drop of numbers that are 2, and return the first one of each channel, or of what may be one."""
    output: Tensor = drop(rate)(torch.full((8192, 2, 2, 2), 2.0, device=device))
    if drop in _CHANNELS:
        channels = output.detach().flatten(_CHANNELS[drop])
        assert torch.equal(channels.amin(-1), channels.amax(-1)), f"{drop.__name__} drops parts of a channel"
    return output.flatten(1)[:, 0]


def _scaled(drop: type[nn.Module], device: torch.device, rate: float) -> Shares:
    return [(_first_of_channels(drop, device, rate) * (1 - rate) / 2, 1 - rate)]


def _alpha(drop: type[nn.Module], device: torch.device, rate: float) -> Shares:
    """Return what is dropped, scaled and shifted back: the mean and variance of SELU are to stay."""
    slope = ((1 - rate) * (1 + rate * _ALPHA**2)) ** -0.5
    output = _first_of_channels(drop, device, rate)
    return [((output / slope + _ALPHA * rate - _ALPHA) / (2 - _ALPHA), 1 - rate)]


_DROPPING: dict[str, Callable[[torch.device, float], Shares]] = {
    "attention": _attention,
    "attention that is causal": partial(_attention, causal=True),
    "attention with a mask": partial(_attention, bias=_MASK),
    "MultiheadAttention": partial(_multihead, need_weights=False),
    "MultiheadAttention and its weights": partial(_multihead, need_weights=True),
    "TransformerEncoderLayer": _encoder,
    **{kind.__name__: partial(_recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)},
    **{kind.__name__: partial(_scaled, kind) for kind in (nn.Dropout, nn.Dropout2d, nn.Dropout3d)},
    **{kind.__name__: partial(_alpha, kind) for kind in (nn.AlphaDropout, nn.FeatureAlphaDropout)},
}


class DroppedTests:
    """Dropout inside of operators."""

    @pytest.mark.parametrize("how", ["at once", "autocast", "checkpoint"])
    @pytest.mark.parametrize("name", _DROPPING)
    def test_dropout_inside(self, accel: Backend, name: str, how: str) -> None:
        """Operators drop at their rate and rescale the rest, also under autocast; a checkpoint drops the same again."""
        names = accel.capabilities.autocast_dtypes
        if how == "autocast" and not names:
            pytest.skip("not declared: autocast")
        low = getattr(torch, names[0]) if how == "autocast" else torch.float32
        for rate in (0.2, 0.6) if how == "at once" else (0.6,):
            seen: list[Shares] = []

            def part(leaf: Tensor, rate: float = rate, seen: list[Shares] = seen) -> Tensor:
                seen.append(_DROPPING[name](accel.device, rate))
                return leaf * sum(numbers.sum() for numbers, _ in seen[-1])

            accel.runtime.seed(41)
            leaf = torch.ones((), device=accel.device, requires_grad=True)
            try:
                with accel.precision.fp32("ieee"), accel.autocast(low) if how == "autocast" else nullcontext():
                    loss = checkpoint(part, leaf, use_reentrant=False) if how == "checkpoint" else part(leaf)
            except Exception as error:
                if not is_refusal(error):
                    raise
                refused(f"{name}: {type(error).__name__}: {error}")
            if how == "checkpoint":
                loss.backward()
                again = [numbers for numbers, _ in seen[-1]]
                assert len(seen) == 2, "backward did not compute the checkpoint again"
                assert all(torch.equal(one, other) for (one, _), other in zip(seen[0], again, strict=True)), (
                    f"{name}: a checkpoint drops others when it is computed again"
                )
            for numbers, share in seen[0]:
                _check(numbers.detach().cpu().double().flatten(), share, 8 * max(eps(low), 1e-5), f"{name} at {rate}")


def _check(numbers: Tensor, share: float, tolerance: float, what: str) -> None:
    kept = numbers > 0.5
    found, deviation = float(kept.double().mean()), math.sqrt(share * (1 - share) / len(numbers))
    assert not is_off(found, share, deviation), f"{what} keeps {found:.4f} instead of {share:.4f}"
    off = numbers - kept.double()
    worst = numbers[off.abs().argmax()]
    assert bool((off.abs() <= tolerance).all()), f"{what} makes {float(worst):.4f} of 1 or 0 after the division"
