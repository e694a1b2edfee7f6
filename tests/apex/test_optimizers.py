"""Ascend's nine optimizers by name, with the defaults of Ascend's apex; and those of NVIDIA's that are torch's."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import accelcore
from accelcore.apex import optimizers, parallel
from accelcore.apex.state import backend_of

BETAS, REQUIRED = (0.9, 0.999), inspect.Parameter.empty
NINE = {
    "NpuFusedSGD": ("sgd", {"lr": REQUIRED, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False}),
    "NpuFusedAdam": ("adam", {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0, "amsgrad": False}),
    "NpuFusedAdamW": ("adamw", {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False}),
    "NpuFusedAdamP": (
        "adamp",
        {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": 0, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False},
    ),
    "NpuFusedAdadelta": ("adadelta", {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0}),
    "NpuFusedLamb": (
        "lamb",
        {"lr": 1e-3, "betas": BETAS, "eps": 1e-6, "weight_decay": 0, "adam": False, "use_global_grad_norm": False},
    ),
    "NpuFusedBertAdam": (
        "bertadam",
        {"lr": REQUIRED, "warmup": -1, "t_total": -1, "schedule": "warmup_linear", "b1": 0.9, "b2": 0.99, "e": 1e-6,
         "weight_decay": 0.01, "max_grad_norm": -1},
    ),
    "NpuFusedRMSprop": (
        "rmsprop", {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False}
    ),
    "NpuFusedRMSpropTF": (
        "rmsproptf",
        {"lr": 1e-2, "alpha": 0.9, "eps": 1e-10, "weight_decay": 0, "momentum": 0, "centered": False,
         "decoupled_decay": False, "lr_in_momentum": True},
    ),
}  # fmt: skip


def parameters():
    return [nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3)), nn.Parameter(torch.ones(3))]


def trained(optimizer, steps=4):
    members = [member for group in optimizer.param_groups for member in group["params"]]
    for step in range(steps):
        for member in members:
            member.grad = (member.detach() * 0.3 + 0.1 * (step + 1)).clone()
        optimizer.step()
    return [member.detach() for member in members]


@pytest.mark.parametrize("name", NINE)
def test_names_arguments_and_defaults_are_those_of_ascends_apex(name):
    create, (registered, defaults) = getattr(optimizers, name), NINE[name]
    signature = inspect.signature(create)
    assert {key: value.default for key, value in list(signature.parameters.items())[1:]} == defaults
    given = {} if defaults["lr"] is not REQUIRED else {"lr": 0.1}
    optimizer = create(parameters(), **given)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.name == registered
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in defaults if key != "lr"} == {k: v for k, v in defaults.items() if k != "lr"}
    trained(optimizer)


@pytest.mark.parametrize(
    ("name", "given", "published"),
    [
        ("FusedAdam", {"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, weight_decay=0.1)),
        ("FusedAdam", {"weight_decay": 0.1, "adam_w_mode": False}, lambda p: torch.optim.Adam(p, weight_decay=0.1)),
        ("FusedSGD", {"lr": 0.1, "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("FusedAdagrad", {"weight_decay": 0.1}, lambda p: torch.optim.Adagrad(p, weight_decay=0.1)),
    ],
    ids=["adamw", "adam", "sgd", "adagrad"],
)
def test_those_of_nvidias_are_torchs(name, given, published):
    found = trained(getattr(optimizers, name)(parameters(), **given))
    torch.testing.assert_close(found, trained(published(parameters())), rtol=1e-5, atol=1e-7)


def test_an_optimizer_without_a_route_on_the_device_is_refused(monkeypatch):
    monkeypatch.delitem(backend_of(parameters()).optimizers._routes, "adagrad")
    with pytest.raises(accelcore.UnsupportedError, match="there is no optimizer 'adagrad' here"):
        optimizers.FusedAdagrad(parameters())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("FusedAdam", {"bias_correction": False}),
        ("FusedSGD", {"lr": 0.1, "wd_after_momentum": True}),
        ("FusedAdagrad", {"adagrad_w_mode": True}),
    ],
)
def test_what_would_be_computed_in_another_way_is_refused(name, given):
    with pytest.raises(accelcore.UnsupportedError):
        getattr(optimizers, name)(parameters(), **given)


def test_nvidias_lamb_is_not_ascends():
    assert not hasattr(optimizers, "FusedLAMB")
    assert optimizers.Lamb(parameters()).name == "lamb"


def test_groups_generators_and_single_tensors_are_taken_as_by_torch():
    first, second = parameters()
    optimizer = optimizers.NpuFusedSGD([{"params": first}, {"params": iter([second]), "lr": 0.5}], 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert len(optimizers.NpuFusedAdam(iter([first, second])).param_groups[0]["params"]) == 2


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": 0.1, "nesterov": True}])
def test_what_no_optimizer_can_be_made_of_is_refused(wrong):
    with pytest.raises(ValueError):
        optimizers.NpuFusedSGD(parameters(), **wrong)


def test_batchnorm_is_converted_and_options_of_the_wrapper_that_change_gradients_are_refused():
    model = parallel.convert_syncbn_model(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert isinstance(model[1], parallel.SyncBatchNorm)
    with pytest.raises(accelcore.UnsupportedError, match="gradient_average=False"):
        parallel.DistributedDataParallel(model, gradient_average=False)
    with pytest.raises(accelcore.UnsupportedError, match="device_ids"):
        parallel.DistributedDataParallel(model, message_size=1, device_ids=[0])
