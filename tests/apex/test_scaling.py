"""Loss scales and skipped steps, against a state machine written by hand and a loop in float64."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelcore
from accelcore.apex import amp, optimizers

KINDS = {
    "ours": lambda parameters: optimizers.NpuFusedSGD(parameters, lr=0.25, momentum=0.5),
    "torch's": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    "torch's fused": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5, fused=True),
}
KIND = pytest.mark.parametrize("kind", KINDS)
LEVEL = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
X = torch.tensor([[1.0, 2.0]])


def made(kind="ours", level="O1", **options):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return amp.initialize(model, KINDS[kind](model.parameters()), opt_level=level, verbosity=0, **options)


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def scale(number=0):
    return amp.state_dict()[f"loss_scaler{number}"]["loss_scale"]


@KIND
@LEVEL
def test_an_overflow_skips_one_step_and_the_schedule_goes_on(kind, level):
    model, optimizer = made(kind, level, loss_scale="dynamic", scale_window=3, dynamic_init_scale=64.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    weight, momentum, expected_scale, clean = torch.ones(1, 2, dtype=torch.float64), None, 64.0, 0
    lr = 0.25
    for overflows in (False, True, True, False, False, False, False, True, False):
        optimizer.zero_grad()
        backward((model(X) * (float("inf") if overflows else 1.0)).sum(), optimizer)
        optimizer.step()
        schedule.step()
        if overflows:
            expected_scale, clean = expected_scale / 2, 0
        else:
            gradient = X.double()
            momentum = gradient if momentum is None else 0.5 * momentum + gradient
            weight = weight - lr * momentum
            clean += 1
            if clean == 3:
                expected_scale, clean = expected_scale * 2, 0
        lr *= 0.5
        state = amp.state_dict()["loss_scaler0"]
        assert state == {"loss_scale": expected_scale, "unskipped": clean}
        torch.testing.assert_close(next(model.parameters()).double(), weight, rtol=0, atol=2e-3 if level > "O1" else 0)
    assert optimizer.param_groups[0]["lr"] == lr


@settings(max_examples=25)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3), st.sampled_from([None, 0.25, 8.0]))
def test_the_scale_moves_within_its_bounds(overflows, window, smallest):
    try:
        model, optimizer = made(
            scale_window=window, dynamic_init_scale=2.0**20, max_loss_scale=2.0**5, min_loss_scale=smallest
        )
        expected, clean = 2.0**5, 0
        for overflow in overflows:
            optimizer.zero_grad()
            backward((model(X) * (math.nan if overflow else 1.0)).sum(), optimizer)
            optimizer.step()
            clean = 0 if overflow else clean + 1
            expected = max(expected / 2, smallest or 0) if overflow else expected
            if clean == window:
                expected, clean = min(expected * 2, 2.0**5), 0
            assert scale() == expected
    finally:
        amp.reset()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_scale_never_becomes_zero(opt_level):
    model, optimizer = made(level=opt_level, dynamic_init_scale=1.0)
    for _ in range(60):
        optimizer.zero_grad()
        backward(model(X).sum() * math.inf, optimizer)
        optimizer.step()
    assert scale() == 2.0**-24
    optimizer.zero_grad()
    backward(model(X).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.tensor([[0.75, 0.5]]))


@KIND
def test_a_static_scale_never_looks_and_never_skips(kind):
    model, optimizer = made(kind, loss_scale="128.0")
    backward(model(X).sum() * math.inf, optimizer)
    optimizer.step()
    assert not model.weight.isfinite().any()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 0}}


@KIND
def test_every_listed_optimizer_skips_once_and_no_other(kind):
    models = [nn.Linear(2, 1, bias=False) for _ in range(3)]
    trained = [KINDS[kind](model.parameters()) for model in models]
    before = [model.weight.detach().clone() for model in models]
    models, trained = amp.initialize(models, trained, num_losses=2, dynamic_init_scale=64.0, verbosity=0)
    backward(models[0](X).sum() * math.inf + models[1](X).sum(), trained[:2])
    backward(models[2](X).sum(), [trained[2]], loss_id=1)
    for optimizer in trained:
        optimizer.step()
    moved = [not torch.equal(model.weight, was) for model, was in zip(models, before, strict=True)]
    assert moved == [False, False, True]
    assert (scale(0), scale(1)) == (32.0, 64.0)
    for optimizer in trained:
        optimizer.zero_grad()
    backward(models[0](X).sum() + models[1](X).sum(), trained[:2])
    trained[0].step()
    trained[1].step()
    assert not any(torch.equal(model.weight, was) for model, was in zip(models, before, strict=True))


def test_a_skipped_step_is_said_unless_verbosity_is_0(caplog):
    model, optimizer = made()
    loud_model = nn.Linear(2, 1)
    loud_model, loud = amp.initialize(loud_model, KINDS["torch's"](loud_model.parameters()))
    with caplog.at_level(logging.WARNING, "accelcore"):
        for each, trained in ((model, optimizer), (loud_model, loud)):
            backward(each(X).sum() * math.inf, trained)
            trained.step()
    assert [record.getMessage() for record in caplog.records] == [
        "a gradient overflowed: this step is skipped, and the loss scale is now 16384"
    ]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("combine", [None, True])
def test_a_delayed_pass_leaves_gradients_scaled_for_the_next_to_unscale(level, combine):
    model, optimizer = made(level=level, loss_scale=8.0, combine_grad=combine)
    backward(model(X).sum(), optimizer, delay_unscale=True)
    assert model.weight.grad.flatten().tolist() == [8.0, 16.0]
    with pytest.raises(accelcore.AmpError, match="still scaled"):
        optimizer.step()
    backward(model(X).sum(), optimizer)
    (master,) = amp.master_params(optimizer)
    assert master.grad.flatten().tolist() == [2.0, 4.0]
    backward(model(X).sum(), optimizer, delay_unscale=True)  # on top of what is unscaled already
    backward(model(X).sum(), optimizer)
    assert next(iter(amp.master_params(optimizer))).grad.flatten().tolist() == [4.0, 8.0]
    optimizer.step()
    torch.testing.assert_close(model.weight.float(), torch.tensor([[0.0, -1.0]]))


def test_scaled_gradients_are_not_unscaled_by_another_scale():
    model, optimizer = made(num_losses=2)
    backward(model(X).sum(), optimizer, delay_unscale=True)
    with pytest.raises(accelcore.AmpError, match="another loss scale"):
        backward(model(X).sum(), optimizer, loss_id=1)
    optimizer.zero_grad()
    backward(model(X).sum(), optimizer, delay_unscale=True)
    other_model = nn.Linear(2, 1)
    other = KINDS["ours"](other_model.parameters())
    other_model, other = amp.initialize(other_model, other, verbosity=0)
    with pytest.raises(accelcore.AmpError, match="another loss scale"):
        backward(model(X).sum(), optimizer)


@pytest.mark.parametrize("delayed", [True, False], ids=["in the delayed pass", "in the next"])
def test_an_overflow_in_a_pass_whose_check_is_delayed_is_not_forgotten(delayed):
    model, optimizer = made(dynamic_init_scale=64.0)
    backward(model(X).sum() * (math.inf if delayed else 1.0), optimizer, delay_overflow_check=True)
    backward(model(X).sum() * (1.0 if delayed else math.inf), optimizer)
    assert scale() == 32.0
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0]]


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    model, optimizer = made(dynamic_init_scale=64.0)
    backward(model(X).sum() * math.inf, optimizer)

    def fail():
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.weight.grad is None
    backward(model(X).sum(), optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[0.75, 0.5]]


def test_after_many_overflows_the_log_names_the_first_bad_parameter(caplog):
    model, optimizer = made("ours", "O2", dynamic_init_scale=1.0)
    with caplog.at_level(logging.WARNING, "accelcore"):
        for _ in range(20):
            optimizer.zero_grad()
            backward(model(X).sum() * math.inf, optimizer)
            optimizer.step()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("20 updates in a row")
    assert "that of 0.weight" in said


def test_no_host_waits_for_an_optimizer_whose_kernel_skips(monkeypatch):
    model, optimizer = made("torch's fused")
    backward(model(X).sum() * math.inf, optimizer)
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("the host waited"))
    optimizer.step()
    assert torch.equal(model.weight, torch.ones(1, 2))


def test_calls_out_of_order_are_refused():
    model, loss = nn.Linear(2, 1), torch.ones(())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="before"), amp.scale_loss(loss, optimizer):
        pass
    made()
    with pytest.raises(RuntimeError, match="was not given"), amp.scale_loss(loss, optimizer):
        pass
    model, optimizer = made(num_losses=2)
    for number in (2, -1, True, "0"):
        with pytest.raises(RuntimeError, match="0 to 1"), amp.scale_loss(loss, optimizer, loss_id=number):
            pass
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


def test_the_state_is_apexs_and_what_does_not_fit_is_said(caplog):
    made(num_losses=2)
    saved = {f"loss_scaler{n}": {"loss_scale": 2.0 ** (8 + n), "unskipped": 10 + n} for n in range(2)}
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    assert amp.state_dict(destination={"a": 1}) == {"a": 1, **saved}
    with caplog.at_level(logging.WARNING, "accelcore"):
        made()
        amp.load_state_dict(saved)
        assert scale() == 2.0**8
        made(loss_scale=128.0)
        amp.load_state_dict(saved)
        assert scale() == 128.0
    said = [record.getMessage() for record in caplog.records]
    assert ["2 loss scales, and this run 1" in each or "256 is not used" in each for each in said] == [True] * 3
    for wrong in ({"loss_scaler0": {"scale": 1.0}}, {"master": {}}):
        with pytest.raises(accelcore.CheckpointError):
            amp.load_state_dict(wrong)


def test_scripts_read_the_scale_and_cannot_set_what_has_no_meaning_here():
    made(num_losses=2, loss_scale=4.0)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0, 4.0]
    with pytest.raises(AttributeError):
        amp._amp_state.loss_scalers[0]._scale_seq_len = 50


def test_amp_that_is_not_enabled_does_nothing():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize([model], enabled=False) == [model]
    loss = model(X).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.state_dict() == {}
