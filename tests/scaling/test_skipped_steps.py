"""A skipped step leaves no trace, and calls out of order are refused."""

from __future__ import annotations

import pytest
import torch

from accelcore.errors import TrainingError
from tests.scaling.scaled_steps import INF, NAN, ROUTES, in_use, parameter, train_step

OF_ADAGRAD = [route for route in ROUTES if route != "native"]
ROUTES_OF = [(name, route) for name in ("adam", "adamw", "sgd") for route in ROUTES]
ROUTES_OF += [("adagrad", route) for route in OF_ADAGRAD]


@pytest.mark.parametrize(("name", "route"), ROUTES_OF)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_skipped_step_changes_no_weight_and_counts_for_nothing(accel, name, route, bad):
    """A run with an overflow in it ends where the same run without that step ends."""

    def run(steps):
        weight = parameter(1.0, -2.0)
        options = {"momentum": 0.5} if name == "sgd" else {}
        optimizer = accel.optimizers.create(name, [weight], lr=0.125, route=route, weight_decay=0.5, **options)
        scaler = accel.scaler.create(init=2.0)
        for factors in steps:
            train_step(scaler, optimizer, weight, factors)
        return weight, optimizer.state[weight], scaler

    steps = [(1.0, 2.0), (0.5, -1.0), (4.0, 4.0)]
    weight, state, scaler = run([steps[0], (bad, 1.0), (1.0, bad), *steps[1:]])
    plain, plain_state, _ = run(steps)
    assert scaler.skipped == 2
    assert weight.tolist() == plain.tolist()
    assert set(state) == set(plain_state)
    for key, value in plain_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize(("name", "route"), ROUTES_OF)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.5}], ids=["plain", "momentum"])
def test_a_run_whose_first_step_overflows_is_right_from_the_second_on(accel, name, options, route):
    options = options if name == "sgd" else {}

    def run(*steps):
        weight = parameter(1.0, -2.0)
        optimizer = accel.optimizers.create(name, [weight], lr=0.125, route=route, **options)
        scaler = accel.scaler.create(init=2.0)
        for factors in steps:
            train_step(scaler, optimizer, weight, factors)
        return weight.tolist()

    # What a fresh allocation holds is chance; in this mode torch fills it with NaN, which nobody takes for zero.
    torch.use_deterministic_algorithms(True)
    try:
        assert run((INF, 1.0)) == [1.0, -2.0]
        assert run((INF, 1.0), (2.0, 1.0), (1.0, 1.0)) == run((2.0, 1.0), (1.0, 1.0))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("route", ROUTES)
def test_a_schedule_stepped_after_a_skipped_first_step_stays_quiet(accel, route):
    weight = parameter()
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route=route)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train_step(accel.scaler.create(), optimizer, weight, (INF, 1.0))
    schedule.step()  # a warning is an error here


def test_fused_optimizers_keep_no_reference_to_the_scaler(accel):
    scaler, weight = accel.scaler.create(), parameter()
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route="fused")
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("route", ROUTES)
def test_calls_out_of_order_are_refused_and_the_next_right_step_works(accel, route):
    scaler, weight = in_use(accel.scaler.create()), parameter(1.0, -2.0)
    optimizer = accel.optimizers.create("adamw", [weight], lr=0.125, route=route)
    with pytest.raises(TrainingError, match="update was called before"):
        scaler.update()
    weight.grad = torch.tensor([65536.0, 65536.0])
    scaler.unscale_(optimizer)
    with pytest.raises(TrainingError, match="unscale_ was already called"):
        scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    stepped = weight.tolist()
    with pytest.raises(TrainingError, match="step was called twice"):
        scaler.step(optimizer)
    with pytest.raises(TrainingError, match="step was already called"):
        scaler.unscale_(optimizer)
    assert weight.tolist() == stepped
    scaler.update()
    with pytest.raises(TrainingError, match="update was called before"):
        scaler.update()
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    assert weight.tolist() != stepped
    assert scaler.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("make", ["create", "static", "none"])
def test_a_closure_is_refused(accel, make):
    scaler = {
        "create": lambda: accel.scaler.create(),
        "static": lambda: accel.scaler.create(init=8.0, dynamic=False),
        "none": accel.scaler.none,
    }[make]()
    in_use(scaler)
    optimizer = torch.optim.SGD([weight := parameter()], lr=0.5)
    weight.grad = torch.ones(2)
    with pytest.raises(TrainingError, match="closure"):
        scaler.step(optimizer, lambda: weight.sum())
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loss_that_was_not_scaled_is_refused_at_its_gradients(accel, dynamic):
    """torch's scaler refuses it, too: else each gradient is divided by 65536, and nothing is trained."""
    scaler, weight = accel.scaler.create(dynamic=dynamic), parameter()
    optimizer = accel.optimizers.create("sgd", [weight], lr=0.5)
    scaler.load_state_dict(scaler.state_dict())
    weight.sum().backward()
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(TrainingError, match="never scaled a loss") as caught:
            call(optimizer)
    assert "scaler.scale(loss).backward()" in caught.value.remedy
    assert weight.grad.tolist() == [1.0, 1.0]
    train_step(scaler, optimizer, weight, (1.0, 1.0))
    assert weight.tolist() == [0.5, -2.5]
    weight.grad = torch.full((2,), scaler.get_scale())  # as a replayed graph computes it: `scale` is not called again
    scaler.step(optimizer)
    assert weight.tolist() == [0.0, -3.0]
