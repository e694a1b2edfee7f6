"""Clipping is torch's, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelcore
from accelcore.training.gradients import Clipping


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
@example(sizes=[62, 29], scale=0.3, max_norm=1e-8, dtypes=(torch.float32, torch.bfloat16), seed=0)  # an odd last bit
def test_it_is_clip_grad_norm(sizes, scale, max_norm, dtypes, seed):
    """To the last bit, if all gradients have one dtype: torch sums the norms of one dtype after the other."""
    ours = gradients(sizes, scale, seed, dtypes)
    theirs = [nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = Clipping(max_norm, flagged=False)(ours, lambda norm: norm)
    is_mixed = len(dtypes) > 1
    torch.testing.assert_close(norm, expected, rtol=1e-6 * is_mixed, atol=0, equal_nan=True)
    for mine, parameter in zip(ours, theirs, strict=True):
        rounding = is_mixed * (2e-6 + torch.finfo(mine.dtype).eps)
        torch.testing.assert_close(mine, parameter.grad, rtol=rounding, atol=0, equal_nan=True)


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


def adaptive(parameters):
    """Brock et al. 2021, of whole tensors; it puts new tensors in place of gradients."""
    for parameter in parameters:
        most = 0.01 * parameter.norm().clamp(min=1e-3)
        norm = parameter.grad.norm()
        if norm > most:
            parameter.grad = parameter.grad * (most / norm)


@pytest.mark.parametrize("clip", [lambda parameters: nn.utils.clip_grad_value_(parameters, 0.02), adaptive])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"loss_scale": 1024.0}, {"precision": accelcore.Policy(model_dtype="bfloat16")}]
)
@pytest.mark.parametrize("name", ["sgd", "torch's"])
def test_by_a_function_as_by_hand(accel, clip, flat, options, name):
    def net():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 2), nn.Linear(2, 2))  # the last goes unused

    low = "precision" in options
    ours, hand = net(), net()
    kind = torch.optim.SGD if name == "torch's" else accel.optimizers.create
    made = kind(ours.parameters(), lr=0.5) if name == "torch's" else kind("sgd", ours.parameters(), lr=0.5)
    trainer = accel.trainer(
        ours, made, loss=lambda m, x: m[1](m[0](x)).square().sum(), clip=clip, flat=flat, accumulate=2, **options
    )
    its = torch.optim.SGD(hand.parameters(), lr=0.5)
    feed = [torch.randn(3, 7, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    for number, x in enumerate(feed, start=1):
        trainer(x.bfloat16() if low else x)
        (hand[1](hand[0](x)).square().sum() / 2).backward()
        if number % 2 == 0:
            clip([parameter for parameter in hand.parameters() if parameter.grad is not None])
            its.step()
            its.zero_grad()
    for mine, by_hand in zip(ours.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), by_hand, **({"rtol": 0.05, "atol": 0.02} if low else {}))


def test_what_a_function_does_to_an_overflow_is_skipped_with_it(accel):
    model = nn.Linear(2, 2)
    trainer = accel.trainer(
        model, accel.optimizers.create("adamw", model.parameters()), loss=lambda m, x: m(x).sum(), loss_scale="dynamic",
        clip=lambda parameters: [parameter.grad.zero_() for parameter in parameters],
    )  # fmt: skip
    before = model.weight.detach().clone()
    trainer(torch.full((1, 2), float("inf")))
    assert trainer.skipped == 1
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"clip": 1.0}, r"clip_norm=, or clip=lambda"), ({"clip": adaptive, "clip_norm": 1.0}, "give one of them")],
)
def test_mistakes(accel, options, says):
    model = nn.Linear(2, 2)
    with pytest.raises(accelcore.ConfigurationError, match=says):
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), **options)
