"""Groups with equal options are one kernel call in flat memory, and the updates are those of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore
from accelcore.optim.formulas import FLAT_FORMULAS

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


@pytest.mark.parametrize("decay", [lambda number: number % 2 / 10, lambda number: number / 1000], ids=["2", "200"])
@pytest.mark.parametrize(("name", "route"), [("adamw", "auto"), ("lamb", "formula"), ("adagrad", "loop")])
def test_torch_compares_few_of_many_groups_and_each_group_is_as_torch_makes_it(monkeypatch, name, route, decay):
    """torch compares each new group with all groups before it, which takes minutes for ten thousand."""
    compared, add = [], torch.optim.Optimizer.add_param_group

    def counted(self, group):
        compared.append(len(self.param_groups))
        add(self, group)

    def groups(count):
        return [
            {"params": [(f"{number}", parameter)], "weight_decay": decay(number), "initial_lr": float(number)}
            for number, parameter in enumerate(parameters[:count])
        ]

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(200)]
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", counted)
    optimizers = accelcore.select("cpu").optimizers
    optimizer = optimizers.create(name, groups(200), route=route, lr=0.5)
    assert sum(compared) < 200 * 199 / 2 / 2
    # Two groups are made by torch one by one.
    small = optimizers.create(name, groups(2), route=route, lr=0.5)
    [template, _] = small.param_groups
    assert len(optimizer.param_groups) == 200
    for number, group in enumerate(optimizer.param_groups):
        assert group["params"][0] is parameters[number]
        own = {"weight_decay": decay(number), "initial_lr": float(number), "param_names": [f"{number}"]}
        assert group == template | own | {"params": group["params"]}
        assert optimizer.state[parameters[number]].keys() == small.state[parameters[0]].keys()


def test_a_class_of_one_group_refuses_more_and_duplicates_are_refused():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizers = accelcore.select("cpu").optimizers
    with pytest.raises(accelcore.ConfigurationError, match="parameter groups"):
        optimizers.create("lbfgs", [{"params": [parameter]} for parameter in parameters])
    named = [{"params": [(str(n), nn.Parameter(torch.ones(2)))], "lr": n + 1.0} for n in range(100)]
    with pytest.raises(accelcore.ConfigurationError, match="with/without names"):
        optimizers.create("adamw", [*named, {"params": parameters}])
    with pytest.raises(accelcore.ConfigurationError, match=r"shape \(2,\) is in the groups 2 and 4"):
        optimizers.create("adamw", [{"params": [parameter]} for parameter in [*parameters, parameters[2]]])


def test_a_parameter_that_is_given_twice_is_named():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizers, named = accelcore.select("cpu").optimizers, list(model.named_parameters())
    body, head = [{"params": named[:2]}, {"params": named[2:]}]
    for groups, says in (
        ([body, head, {"params": named[1:2]}], r"'0\.bias' is in the groups 0 and 2"),
        ([*named, named[3]], r"'1\.bias' is twice in group 0"),
        (list(model.parameters()) * 2, r"a parameter of shape \(3, 2\) is twice in group 0(.|\n)*named_parameters"),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=says):
            optimizers.create("adamw", groups)
    optimizer = optimizers.create("adamw", [body])
    with pytest.raises(accelcore.ConfigurationError, match=r"'0\.weight' is in the groups 0 and 1") as raised:
        optimizer.add_param_group({"params": iter(named)})
    assert isinstance(raised.value.__cause__, ValueError)
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="non-leaf"):
        optimizer.add_param_group({"params": [("new", model[1].weight * 2)]})
    optimizer.add_param_group(head)
    assert len(optimizer.param_groups) == 2


def test_a_trainer_refuses_an_optimizer_that_has_a_parameter_twice(accel):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model[1].bias]})
    with pytest.raises(accelcore.ConfigurationError, match=r"'1\.bias' is in the groups 0 and 1"):
        accel.trainer(model, optimizer)


def test_a_lazy_parameter_is_refused_until_it_has_a_shape(accel):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 1))
    for make in (
        lambda: accel.optimizers.create("adamw", model.parameters()),
        lambda: accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum()),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=r"no shape yet(.|\n)*LazyLinear"):
            make()
    model(torch.ones(2, 4))
    assert accel.optimizers.create("adamw", model.parameters()).route
