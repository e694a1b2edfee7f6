"""An optimizer in a loop of one's own, against torch's own class in the same loop."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import accelcore
from accelcore.optim.torch_routes import FUSED

ROUTES = pytest.mark.parametrize("route", ["fused", "loop", "foreach"])
NAMES = pytest.mark.parametrize("name", ["adamw", "sgd"])
OPTIONS = {"adamw": {"lr": 0.05, "eps": 1e-3, "amsgrad": True}, "sgd": {"lr": 0.1, "momentum": 0.9}}
THEIRS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))


def pair(accel, name, route):
    ours, other = net(), net()
    return (
        (ours, accel.optimizers.create(name, ours.parameters(), route=route, **OPTIONS[name])),
        (other, THEIRS[name](other.parameters(), foreach=False, **OPTIONS[name])),
    )


def feed(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 2, 3, 3, generator=generator) for _ in range(count)]


def train(model, optimizer, batches, **zeroing):
    for batch in batches:
        optimizer.zero_grad(**zeroing)
        model(batch.to(model[2].weight.dtype)).square().mean().backward()
        optimizer.step()


def same(one, other):
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


@NAMES
@ROUTES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_none_is_no_zero(accel, name, route, set_to_none):
    """A layer that gets no gradient any more stands still, or goes on by its momentum, as its gradient is None or 0."""
    ours, theirs = pair(accel, name, route)
    for model, optimizer in (ours, theirs):
        train(model, optimizer, feed(3), set_to_none=set_to_none)
        model[0].requires_grad_(False)
        before = model[0].weight.clone()
        train(model, optimizer, feed(3), set_to_none=set_to_none)
        assert torch.equal(model[0].weight, before) is set_to_none
    same(ours[0], theirs[0])


@NAMES
@ROUTES
@pytest.mark.parametrize("change", ["strides", "data", "dtype", "gaps"])
def test_parameters_may_be_given_other_memory_between_steps(accel, name, route, change):
    ours, theirs = pair(accel, name, route)
    for model, optimizer in (ours, theirs):
        train(model, optimizer, feed(3))
        if model is theirs[0]:
            pass  # the oracle stays as it is: where memory lies changes no number
        elif change == "strides":
            model.to(memory_format=torch.channels_last)
        elif change == "data":
            model[2].weight.data = model[2].weight.data.clone()
        elif change == "dtype":
            model.double()
        else:
            model[2].weight.data = torch.stack([model[2].weight.data] * 2, -1)[..., 0]
        if change == "gaps" and route == "fused" and model is ours[0]:
            with pytest.raises(accelcore.UnsupportedError, match="without gaps"):
                train(model, optimizer, feed(3))
            return
        train(model, optimizer, feed(3))
    ours[0].float()
    same(ours[0], theirs[0])


@NAMES
@ROUTES
def test_state_dicts_are_torchs_in_both_directions_and_survive_pickling(accel, name, route):
    (model, ours), (other, theirs) = pair(accel, name, route)
    train(model, ours, feed(3))
    train(other, theirs, feed(3))
    crossed_model, crossed = pair(accel, name, route)[1]
    crossed_model.load_state_dict(model.state_dict())
    crossed.load_state_dict(pickle.loads(pickle.dumps(ours.state_dict())))
    back_model, back = pair(accel, name, route)[0]
    back_model.load_state_dict(other.state_dict())
    back.load_state_dict(theirs.state_dict())
    for each in ((crossed_model, crossed), (back_model, back), (other, theirs)):
        train(*each, feed(3))
    same(crossed_model, other)
    same(back_model, other)


@NAMES
def test_loading_takes_copies_and_a_state_of_other_shapes_changes_nothing(accel, name):
    (model, ours), _ = pair(accel, name, "auto")
    train(model, ours, feed(2))
    state = ours.state_dict()
    twin_model, twin = pair(accel, name, "auto")[0]
    twin.load_state_dict(state)
    before = copy.deepcopy(state)
    train(twin_model, twin, feed(3))
    for number, entry in before["state"].items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(state["state"][number][key]), torch.as_tensor(value))
    key = "exp_avg" if name == "adamw" else "momentum_buffer"
    broken = copy.deepcopy(before)
    broken["state"][0][key] = torch.zeros(1)
    with pytest.raises(ValueError, match=key):
        ours.load_state_dict(broken)
    broken = copy.deepcopy(before)
    broken["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="parameter groups"):
        ours.load_state_dict(broken)
    now = ours.state_dict()
    assert all(torch.equal(now["state"][n][key], entry[key]) for n, entry in before["state"].items())


@NAMES
@ROUTES
def test_torchs_grad_scaler_drives_it_and_skips_what_overflowed(accel, name, route):
    results = []
    for model, optimizer in pair(accel, name, route):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, batch in enumerate(feed(5)):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            scaler.scale(loss * (float("inf") if number == 2 else 1)).backward()
            if number > 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        results.append((model, scaler.get_scale()))
    same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 512.0


def test_every_fused_class_starts_state_in_the_layout_of_its_parameter(accel):
    for name in FUSED:
        parameter = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        options = {"momentum": 0.9} if name == "sgd" else {}
        optimizer = accel.optimizers.create(name, [parameter], route="fused", **options)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = [value for value in optimizer.state[parameter].values() if value.dim()]
        assert found
        assert all(value.stride() == parameter.stride() for value in found)


@NAMES
@ROUTES
def test_groups_added_after_steps_and_options_changed_hold_from_the_next_step_on(accel, name, route):
    results = []
    for make in (lambda p: accel.optimizers.create(name, p, route=route, **OPTIONS[name]),
                 lambda p: THEIRS[name](p, foreach=False, **OPTIONS[name])):  # fmt: skip
        model = net()
        optimizer = make(model[2].parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, feed(2))
        model[0].zero_grad()
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
        optimizer.param_groups[0]["weight_decay"] = 0.3
        train(model, optimizer, feed(2))
        schedule.step()
        train(model, optimizer, feed(2))
        results.append(model)
    same(*results)


@NAMES
@ROUTES
@pytest.mark.parametrize("bound", [False, True])
def test_a_group_of_another_dtype_is_trained_beside_the_first(accel, name, route, bound):
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double().requires_grad_(False)])
        make = partial(accel.optimizers.create, name, route=route) if ours else partial(THEIRS[name], foreach=False)
        optimizer = make(model[0].parameters(), **OPTIONS[name])

        def loss_of(m, x):
            return m[0](x).square().mean() + m[1](x.double()).square().mean()

        def step(x, model=model, optimizer=optimizer, loss_of=loss_of):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

        if ours and bound:
            step = accel.trainer(model, optimizer, loss=loss_of)
        step(torch.ones(1, 2))
        model[1].zero_grad()
        optimizer.add_param_group({"params": model[1].requires_grad_(True).parameters()})
        if ours and bound:
            step.refresh()
        step(torch.ones(1, 2))
        step(torch.ones(1, 2))
        results.append(model)
    same(*results)
