"""What the NPU's optimizers do beside the arithmetic: routes, refusals, groups, schedules, memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore
from accelcore.errors import TrainingError, UnsupportedError


def fill_gradients(parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


# What was not so when the optimizer was made.


def test_sparse_gradients_are_refused_with_what_to_do(accel):
    table = nn.Embedding(10, 4, sparse=True).to(accel.device)
    optimizer = accel.optimizers.create("adam", table.parameters())
    table(torch.tensor([1, 2], device=accel.device)).sum().backward()
    with pytest.raises(TrainingError, match="sparse"):
        optimizer.step()


def test_a_model_that_was_cast_takes_the_route_of_what_it_is_now(accel):
    model = nn.Linear(3, 2).to(accel.device)
    optimizer = accel.optimizers.create("adam", model.parameters())
    alone = accel.optimizers.create("lamb", model.parameters())
    assert optimizer.route == alone.route == "npu_fused"
    model.to(torch.bfloat16)
    before = model.weight.detach().clone()
    fill_gradients(model.parameters())
    optimizer.step()
    assert optimizer.route != "npu_fused"
    assert not torch.equal(model.weight.detach(), before)
    alone.step()
    assert alone.route == "formula"


@pytest.mark.parametrize("name", ["adamp", "adamw", "lamb"])
def test_a_model_that_is_still_on_the_host_is_trained_there(accel, name):
    def train(device):
        parameters = [nn.Parameter(torch.arange(1.0, 7.0, device=device).view(2, 3)) for _ in range(2)]
        optimizer = accel.optimizers.create(name, parameters, lr=0.1)
        fill_gradients(parameters)
        optimizer.step()
        assert {parameter.device for parameter in parameters} == {torch.device(device)}
        return [parameter.detach().cpu() for parameter in parameters]

    torch.testing.assert_close(train("cpu"), train("npu:0"))


@pytest.mark.parametrize("name", ["adamp", "adamw", "sgd"])
def test_a_weight_that_was_given_new_memory_is_the_one_that_is_updated(accel, name):
    model = nn.Linear(3, 2).to(accel.device)
    optimizer = accel.optimizers.create(name, model.parameters(), lr=0.1)
    for _ in range(2):
        model.weight.data = model.weight.detach().clone()
        before = model.weight.detach().clone()
        fill_gradients(model.parameters())
        optimizer.step()
        assert not torch.equal(model.weight.detach(), before)


# Which route is taken, and why not another.


def test_the_routes_of_each_optimizer(accel):
    routes = {name: [choice.route for choice in accel.optimizers.explain(name)] for name in accel.optimizers.names()}
    assert {name for name, found in routes.items() if found[0] == "npu_fused"} == set(
        accel.capabilities.native_optimizers
    )
    assert routes["adamw"] == ["npu_fused", "fused", "loop", "foreach", "formula"]
    assert routes["lamb"] == ["npu_fused", "formula"]
    assert routes["adagrad"] == ["loop", "foreach"]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("adam", {"maximize": True}, "maximize"),
        ("adamw", {"capturable": True}, "capturable"),
        ("sgd", {"differentiable": True}, "differentiable"),
        ("adam", {"decoupled_weight_decay": True}, "couples weight decay"),
        ("sgd", {"momentum": 0.9, "dampening": 0.1}, "dampening"),
        ("adam", {"lr": torch.tensor(0.1)}, "tensor"),
        ("lamb", {"state_dtype": "bfloat16"}, "state in float32"),
    ],
)
def test_what_the_fused_class_cannot_do_is_left_to_the_next_route_with_the_reason(accel, name, options, reason):
    choices = accel.optimizers.explain(name, **options)
    assert choices[0].route == "npu_fused"
    assert not choices[0].chosen
    assert reason in choices[0].reason


def test_a_sharded_parameter_is_left_to_torch(accel):
    class Sharded(torch.Tensor):
        pass

    parameter = nn.Parameter(torch.ones(3).as_subclass(Sharded))
    with pytest.raises(UnsupportedError, match="Sharded"):
        accel.optimizers.create("lamb", [parameter], route="npu_fused")
    assert accel.optimizers.create("adam", [parameter]).route == "loop"


def test_parameters_that_share_memory_are_left_to_torch(accel):
    whole = torch.ones(6)
    parameters = [nn.Parameter(whole), nn.Parameter(whole[4:])]
    routes = [accel.optimizers.create("sgd", some, lr=0.1).route for some in (parameters, parameters[:1])]
    assert routes == ["fused", "npu_fused"]
    with pytest.raises(UnsupportedError, match="share memory"):
        accel.optimizers.create("lamb", parameters, route="npu_fused")


def test_parameters_on_two_devices_stay_where_they_are(accel):
    accelcore.select("npu:1")
    parameters = [nn.Parameter(torch.ones(3, device=f"npu:{index}")) for index in (0, 1)]
    optimizer = accel.optimizers.create("adam", parameters, lr=0.1)
    fill_gradients(parameters)
    optimizer.step()
    assert [str(parameter.device) for parameter in parameters] == ["npu:0", "npu:1"]
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), 0.9))
    accelcore.select("npu:0")
