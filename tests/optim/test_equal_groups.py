"""Groups with equal options are one kernel call in flat memory, and the updates are those of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore
from accelcore.optim.flat.formula import FLAT_FORMULAS

OPTIONS = {
    "adamp": {"lr": 0.02},
    "bertadam": {"lr": 0.02, "max_grad_norm": 0.1},
    "lamb": {"lr": 0.02},
    "rmsprop": {"lr": 0.02, "momentum": 0.5},
    "rmsproptf": {"lr": 0.02, "momentum": 0.5},
}
BY_GROUP = {"bertadam"}


@pytest.fixture
def accel():
    """With a route over flat memory for each, which notes how many pieces it was given at last."""
    backend = accelcore.select("cpu")
    for name in OPTIONS:

        class Counting(FLAT_FORMULAS[name]):
            def place_runs(self, runs):
                self.runs = len(runs)
                super().place_runs(runs)

        backend.optimizers.register(name, "whole", Counting, priority=50, memory="flat")
    return backend


def made(accel, name, route):
    """Six layers, a group each; every other one with another decay."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).double()
    groups = [
        {"params": list(layer.parameters()), "weight_decay": 0.1 * (number % 2)} for number, layer in enumerate(model)
    ]
    return model, accel.optimizers.create(name, groups, route=route, **OPTIONS[name])


def data(number):
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, step, steps, *, without=()):
    for number in range(steps):
        optimizer.zero_grad()
        model(data(number)).square().sum().backward()
        for layer in without:
            model[layer].weight.grad = None
        step()


@pytest.mark.parametrize("name", OPTIONS)
def test_as_many_pieces_as_there_are_options(accel, name):
    model, optimizer = made(accel, name, "whole")
    other, reference = made(accel, name, "formula")
    train(model, optimizer, optimizer.step, 3)
    assert optimizer.implementation.runs == (6 if name in BY_GROUP else 2)
    train(other, reference, reference.step, 3)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_they_part_where_their_options_do(accel, name):
    model, optimizer = made(accel, name, "whole")
    other, reference = made(accel, name, "formula")
    for net, each in ((model, optimizer), (other, reference)):
        train(net, each, each.step, 2)
        each.param_groups[2]["lr"] = 0.03
        train(net, each, each.step, 2)
        train(net, each, each.step, 1, without=[3])
        train(net, each, each.step, 2)
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
        for key, value in reference.state[expected].items():
            torch.testing.assert_close(optimizer.state[parameter][key], value)


def test_a_trainer_and_a_state_of_another_division(accel):
    """Each parameter has its own state, which goes to groups that are divided otherwise, and on as it was."""
    model, optimizer = made(accel, "rmsprop", "whole")
    trainer = accel.trainer(model, optimizer)
    other, reference = made(accel, "rmsprop", "formula")
    train(other, reference, reference.step, 2)
    for number in range(2):
        trainer.backward(trainer.forward(data(number)).square().sum())
        trainer.update()
    assert optimizer.implementation.runs == 2
    saved = optimizer.state_dict()
    for group in saved["param_groups"][2:]:
        group["lr"] = 0.1
    for each in (optimizer, reference):
        each.load_state_dict(saved)
    for number in range(2):
        trainer.backward(trainer.forward(data(number)).square().sum())
        trainer.update()
    train(other, reference, reference.step, 2)
    assert optimizer.implementation.runs == 6
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


def test_a_class_of_one_group_refuses_more_and_duplicates_are_refused():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizers = accelcore.select("cpu").optimizers
    with pytest.raises(accelcore.ConfigurationError, match="parameter groups"):
        optimizers.create("lbfgs", [{"params": [parameter]} for parameter in parameters])
    named = [{"params": [(str(n), nn.Parameter(torch.ones(2)))], "lr": n + 1.0} for n in range(100)]
    with pytest.raises(accelcore.ConfigurationError, match="with/without names"):
        optimizers.create("adamw", [*named, {"params": parameters}])
    with pytest.raises(accelcore.ConfigurationError, match="more than one parameter group"):
        optimizers.create("adamw", [{"params": [parameter]} for parameter in [*parameters, parameters[2]]])
