"""Optimizers that somebody else has made, and torch's classes in place of names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import accelcore


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def train(model, optimizer, steps):
    rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.2, "foreach": True}),
        (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "maximize": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.RAdam, {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("steps", [0, 3])
def test_it_goes_on_as_the_one_it_was_made_of(accel, kind, options, steps):
    models = [net(), net()]
    made = [
        kind([{"params": [*m[0].parameters()]}, {"params": [*m[1].parameters()], "lr": 0.02, "name": "top"}], **options)
        for m in models
    ]
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, steps)
    made[1] = accel.optimizers.fastest(made[1])
    assert made[1].name == kind.__name__.lower()
    assert made[1].route == accel.optimizers.create(kind, net().parameters()).route
    assert made[1].param_groups[1]["name"] == "top"
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, 3)
    for mine, its in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    assert accel.optimizers.fastest(made[1]) is made[1]


def test_one_of_another_class_goes_on_as_it_is_and_the_log_says_so(accel, caplog):
    class Own(torch.optim.SGD):
        pass

    own = Own(net().parameters(), lr=0.1)
    assert accel.optimizers.fastest(own) is own
    assert "Own as it is" in caplog.text


@pytest.mark.parametrize("late", [False, True])
def test_a_scheduler_of_the_slower_optimizer_is_reported(accel, caplog, late):
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    if not late:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.optim.lr_scheduler.StepLR(accel.optimizers.fastest(optimizer), 1)
    assert ["has a scheduler" in record.message for record in caplog.records] == [True] * (not late)


def test_classes_and_mistaken_names(accel):
    model = net()
    assert accel.optimizers.create(torch.optim.AdamW, model.parameters(), lr=0.1).name == "adamw"
    assert accel.optimizers.explain(torch.optim.SGD)
    with pytest.raises(accelcore.UnsupportedError, match="did you mean 'adamw'"):
        accel.optimizers.create("adaw", model.parameters())
    with pytest.raises(accelcore.ConfigurationError, match=r"generator was read before(.|\n)*give model\.parameters"):
        accel.optimizers.create("adamw", [])
    for strange in (nn.Linear, 3, torch.optim.SGD(model.parameters())):
        with pytest.raises(accelcore.ConfigurationError, match="neither the name of an optimizer"):
            accel.optimizers.create(strange, model.parameters())
