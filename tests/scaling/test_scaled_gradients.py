"""What is scaled comes back unscaled: gradients of any size, dtype and kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelcore
from accelcore.errors import TrainingError
from tests.scaling.scaled_steps import INF, NAN, ROUTES, in_use, parameter, train_step

gradients = st.lists(st.floats(-1e6, 1e6, width=32).filter(lambda g: g == 0 or abs(g) > 1e-20), min_size=2, max_size=2)


@given(factors=gradients, exponent=st.integers(0, 24), static=st.booleans())
def test_a_power_of_two_changes_no_bit_of_a_gradient(factors, exponent, static):
    scaler = accelcore.select("cpu").scaler.create(init=2.0**exponent, dynamic=not static)
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loss = (weight * torch.tensor(factors)).sum()
    assert scaler.scale(loss).item() == pytest.approx(loss.item() * 2.0**exponent)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == torch.tensor(factors).tolist()


def test_a_gradient_too_small_for_fp16_survives_by_scaling(accel):
    exact = 1e-8  # below half of fp16's smallest number, 6e-8
    results = []
    for scaler in (accel.scaler.none(), accel.scaler.create()):
        weight = torch.nn.Parameter(torch.eye(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with accel.autocast(torch.float16):
            loss = (torch.ones(1, 4) @ weight).float().sum() * exact
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        results.append(weight.grad.flatten().tolist())
    assert results[0] == [0.0] * 16
    assert results[1] == pytest.approx([exact] * 16, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_any_other_dtype_are_unscaled_and_checked(accel, dtype):
    scaler, weight = accel.scaler.create(init=4.0), parameter(1.0, 2.0, dtype=dtype)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    train_step(scaler, optimizer, weight, (2.0, 4.0))
    assert weight.tolist() == [0.0, 0.0]
    train_step(scaler, optimizer, weight, (2.0, NAN))
    assert weight.tolist() == [0.0, 0.0]
    assert scaler.skipped == 1


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_unscaled_and_checked(accel, dtype, dynamic):
    scaler = accel.scaler.create(init=8.0, dynamic=dynamic)
    weights = [parameter(1 + 2j, 3j, dtype=dtype), parameter(1.0, dtype=torch.float32)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    loss = (weights[0] * weights[0].conj()).real.sum() / 2 + weights[1].sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert weights[0].grad.tolist() == weights[0].tolist()
    scaler.step(optimizer)
    scaler.update()
    assert weights[0].tolist() == [0, 0]
    if dynamic:
        weights[0].grad = torch.tensor([1, complex(0, NAN)], dtype=dtype)
        scaler.step(optimizer)
        scaler.update()
        assert weights[0].tolist() == [0, 0]
        assert scaler.skipped == 1


@pytest.mark.parametrize("dynamic", [True, False])
def test_gradients_with_the_negative_or_conjugate_bit_are_unscaled_and_checked(accel, dynamic):
    """torch's kernels for many tensors refuse to write to them."""
    scaler = in_use(accel.scaler.create(init=8.0, dynamic=dynamic))
    weights = [torch.nn.Parameter(torch.tensor(2.0)), parameter(1 + 2j, 3j, dtype=torch.complex64)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for bad in (False, True):
        weights[0].grad = torch._neg_view(torch.tensor(NAN if bad else 16.0))
        weights[1].grad = torch.tensor([8 + 16j, 24j]).conj()
        scaler.unscale_(optimizer)
        if not bad:
            assert [weight.grad.tolist() for weight in weights] == [-2.0, [1 - 2j, -3j]]
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            assert [weight.tolist() for weight in weights] == [4.0, [4j, 6j]]
    assert scaler.skipped == int(dynamic)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("exact", [0.0, -0.0, 1.5e-45, -3e-40, 1.17e-38])
def test_zeros_and_denormals_are_no_overflow_and_come_back(accel, exact, dynamic):
    scaler, weight = in_use(accel.scaler.create(init=1024.0, dynamic=dynamic)), parameter(1.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.tensor([exact]) * 1024
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == torch.tensor([exact]).tolist()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped == 0


@pytest.mark.parametrize("duplicates", [False, True])
def test_sparse_gradients_are_unscaled_and_checked(accel, duplicates):
    scaler = accel.scaler.create(init=8.0)
    table = torch.nn.Embedding.from_pretrained(torch.arange(8.0).view(4, 2), freeze=False, sparse=True)
    optimizer = accel.optimizers.create("sgd", table.parameters(), lr=1.0, route="loop")
    before = table.weight.detach().clone()
    rows = torch.tensor([1, 1, 3] if duplicates else [1, 3])
    scaler.scale(table(rows).sum()).backward()
    assert table.weight.grad.is_sparse
    scaler.step(optimizer)
    scaler.update()
    moved = torch.zeros(4, 2)
    for row in rows.tolist():
        moved[row] += 1.0
    assert torch.equal(table.weight, before - moved)
    optimizer.zero_grad()
    scaler.scale(table(rows).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight, before - moved)
    assert scaler.skipped == 1


@pytest.mark.parametrize("route", ROUTES)
def test_fp16_gradients_are_refused_untouched(accel, route):
    scaler, weights = in_use(accel.scaler.create()), [parameter(1.0), parameter(1.0, dtype=torch.float16)]
    optimizer = accel.optimizers.create("adamw", weights, lr=0.125, eps=1e-4, route=route)  # 1e-8 is 0 in fp16
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    for use in (scaler.unscale_, scaler.step):
        with pytest.raises(TrainingError, match="fp16") as caught:
            use(optimizer)
        assert "autocast" in caught.value.remedy
    assert [weight.item() for weight in weights] == [1.0, 1.0]
    assert [weight.grad.item() for weight in weights] == [1.0, 1.0]


@pytest.mark.parametrize("dynamic", [True, False])
def test_fp16_gradients_are_taken_where_somebody_says_so(accel, dynamic):
    scaler, weight = in_use(accel.scaler.create(init=4.0, dynamic=dynamic)), parameter(1.0, dtype=torch.float16)
    scaler.takes_fp16 = True
    optimizer = torch.optim.SGD([weight], lr=0.5)
    weight.grad = torch.full_like(weight, 4.0)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5]


def test_a_step_without_gradients_says_nothing_of_the_scale(accel):
    scaler, weights = in_use(accel.scaler.create(interval=2)), [parameter(), parameter()]
    one, other = (torch.optim.SGD([weight], lr=0.5) for weight in weights)
    for _ in range(5):
        scaler.step(one)
        scaler.step(other)
        scaler.update()
    assert scaler.state_dict() == accel.scaler.create(interval=2).state_dict()
    for _ in range(2):  # one of two has some: torch refuses that
        weights[0].grad = torch.ones(2)
        scaler.step(one)
        scaler.step(other)
        scaler.update()
    assert scaler.state_dict()["scale"] == 2 * 65536.0
    assert weights[1].tolist() == [1.0, -2.0]
