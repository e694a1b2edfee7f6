"""Schedulers that a trainer refuses when it is made."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import accelcore


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("scheduler", [StepLR, [None]], ids=["class", "list"])
def test_what_is_no_scheduler_is_refused_when_the_trainer_is_made(accel, scheduler):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    with pytest.raises(accelcore.ConfigurationError, match="is not a scheduler"):
        accel.trainer(model, optimizer, loss=loss_of, scheduler=scheduler)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule_by": "batch"}, "schedule_by='batch' is unknown"),
        ({"scheduler": "plateau", "schedule_by": "epoch"}, '"script": you step it, such as after each epoch'),
        ({"schedule_by": "script"}, "schedule_by='script' .*without a scheduler"),
        ({"scheduler": "plateau"}, "ReduceLROnPlateau.step needs 'metrics'.*\\n.*schedule_by=\"script\""),
    ],
)
def test_when_a_scheduler_is_stepped_has_to_be_one_of_two(accel, options, says):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    if "scheduler" in options:
        options = {**options, "scheduler": ReduceLROnPlateau(optimizer)}
    with pytest.raises(accelcore.ConfigurationError, match=says):
        accel.trainer(model, optimizer, loss=loss_of, **options)
