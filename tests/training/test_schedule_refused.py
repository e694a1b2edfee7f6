"""Schedulers that a trainer refuses when it is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import accelcore


def loss_of(model, batch):
    return model(batch).square().mean()


class ByName:
    last_epoch = 0

    def __init__(self, optimizer, updates):
        self.optimizer = optimizer

    def step(self, *, metric):
        pass

    def state_dict(self):
        return {}

    load_state_dict = get_last_lr = None


class WithoutSignature(LRScheduler):
    step = dict  # as compiled code may be
    get_lr = _initial_step = lambda self: [0.1]


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
        ({"schedule_by": "script"}, "schedule_by='script' needs a scheduler, not None"),
        ({"scheduler": "plateau"}, 'ReduceLROnPlateau.step needs an argument.*\\n.*schedule_by="script"'),
    ],
)
def test_when_a_scheduler_is_stepped_has_to_be_one_of_two(accel, options, says):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    if "scheduler" in options:
        options = {**options, "scheduler": ReduceLROnPlateau(optimizer)}
    with pytest.raises(accelcore.ConfigurationError, match=says):
        accel.trainer(model, optimizer, loss=loss_of, **options)


@pytest.mark.parametrize(
    "make", [lambda optimizer, updates: ReduceLROnPlateau(optimizer), ByName], ids=["plateau", "by name"]
)
def test_a_scheduler_of_a_function_whose_step_needs_an_argument_is_refused(accel, make):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    options = {"loss": loss_of, "scheduler": lambda *given: make(*given), "total_steps": 2}
    with pytest.raises(accelcore.ConfigurationError, match=r'step needs an argument.*\n.*schedule_by="script"'):
        accel.trainer(model, optimizer, **options)


def test_a_scheduler_whose_step_has_no_signature_is_taken(accel):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=loss_of, scheduler=WithoutSignature(optimizer))
    trainer(torch.ones(1, 3))
    assert trainer.steps == 1
