"""Clipping is torch's, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelcore
from accelcore.training.clipping import Clipping


def gradients(sizes, scale, seed, dtypes):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, generator=generator) * scale for size in sizes]
    return [gradient.to(dtypes[n % len(dtypes)]) for n, gradient in enumerate(made)]


@given(
    sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=6),
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 0.3, 1.0, 7.0, 1e10, float("inf"), float("nan")]),
    max_norm=st.one_of(st.sampled_from([1e-8, 1.0, 2, 1e9]), st.floats(1e-3, 1e3)),
    dtypes=st.sampled_from([(torch.float32,), (torch.bfloat16,), (torch.float64,), (torch.float32, torch.bfloat16)]),
    seed=st.integers(0, 99),
)
def test_it_is_bit_equal_to_clip_grad_norm(sizes, scale, max_norm, dtypes, seed):
    ours = gradients(sizes, scale, seed, dtypes)
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = Clipping(max_norm, flagged=False)(ours, lambda norm: norm)
    assert torch.equal(norm, expected) or (norm.isnan() and expected.isnan())
    for mine, parameter in zip(ours, theirs, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), parameter.grad.nan_to_num(7.0))


@given(
    seed=st.integers(0, 999),
    max_norm=st.floats(1e-3, 10),
    loss_scale=st.sampled_from([None, 1024.0, "dynamic"]),
    accumulate=st.integers(1, 3),
)
def test_a_clipped_training_is_bit_equal_to_one_by_hand(seed, max_norm, loss_scale, accumulate):
    """Also with a loss scale, which is a power of two, and so exact."""
    accel = accelcore.select("cpu")

    def net():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))

    ours, hand = net(), net()
    feed = [torch.randn(3, 7) for _ in range(2 * accumulate)]
    trainer = accel.trainer(
        ours, torch.optim.SGD(ours.parameters(), lr=0.1), loss=lambda m, x: m(x).square().sum(), flat=False,
        clip_norm=max_norm, loss_scale=loss_scale, accumulate=accumulate,
    )  # fmt: skip
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    for number, x in enumerate(feed, start=1):
        trainer(x)
        loss = hand(x).square().sum()
        loss.backward(torch.full_like(loss, 1 / accumulate))
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(hand.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("flat", [True, False])
def test_an_overflow_that_is_not_skipped_is_seen_as_torch_shows_it(accel, flat):
    """Without a loss scale nothing is skipped: nan in all that was clipped, and only there."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    trainer = accel.trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m[0](x).sum(), clip_norm=1.0, flat=flat
    )
    trainer(torch.full((1, 2), float("inf")))
    assert model[0].weight.isnan().all()
    assert model[1].weight.isfinite().all()
