"""Large gradients go to flat memory while backward runs: seen from outside, nothing changes."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch import nn

import accelcore

WIDE = 300
"""Of which a square has more elements than a gradient that is taken in as it comes."""


@pytest.fixture
def accel():
    return accelcore.select("cpu")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleList([nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)])


def loss_of(model, batch):
    rows, use = batch
    hidden = torch.tanh(model[0](rows))
    return model[2](model[1](hidden) if use else hidden).square().mean()


def rows(number):
    return torch.randn(3, WIDE, generator=torch.Generator().manual_seed(number))


def trainer_of(accel, model, **options):
    return accel.trainer(
        model, accel.optimizers.create("sgd", model.parameters(), lr=0.1, momentum=0.5), loss=loss_of, **options
    )


def same(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("used", [(True,) * 6, (True, False, True, False, False, False), (False,) * 4 + (True,) * 2])
def test_they_are_those_of_torch(accel, accumulate, used):
    model, other = net(), net()
    trainer = trainer_of(accel, model, flat=True, accumulate=accumulate, clip_norm=0.05)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    for number, use in enumerate(used):
        trainer((rows(number), use))
        (loss_of(other, (rows(number), use)) / accumulate).backward()
        if (number + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(other.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    same(model, other)


def test_an_overflow_leaves_nothing_behind(accel):
    """The gaps between gradients were multiplied by it, too."""
    model = net()
    trainer = trainer_of(accel, model, flat=True, loss_scale="dynamic", clip_norm=0.05)
    trainer((rows(0), True))
    trainer((rows(1) * math.inf, True))
    trainer((rows(2), True))
    assert trainer.skipped == 1
    expected = net()
    clean = trainer_of(accel, expected, flat=False, clip_norm=0.05)
    clean((rows(0), True))
    clean((rows(2), True))
    same(model, expected)


def test_a_window_that_is_open_outlasts_the_backward_pass_of_another_trainer(accel):
    """Which runs through the same module, and would leave its gradients in the same memory."""
    model, other = net(), net()
    outer = trainer_of(accel, model, flat=True, accumulate=2)
    inner = accel.trainer(
        head := nn.Linear(WIDE, WIDE),
        accel.optimizers.create("sgd", head.parameters(), lr=0.0),
        loss=lambda head, rows: loss_of(model, (head(rows), True)),
    )
    by_hand = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.5)
    for number in range(4):
        outer((rows(number), True))
        inner(rows(10 + number))
        (loss_of(other, (rows(number), True)) / 2).backward()
        if number % 2:
            by_hand.step()
            by_hand.zero_grad()
    same(model, other)


def test_a_saved_open_window_has_them_and_a_copy_goes_its_own_way(accel, tmp_path):
    model = net()
    trainer = trainer_of(accel, model, flat=True, accumulate=2)
    trainer((rows(0), True))
    trainer.save(tmp_path)
    twin = copy.deepcopy(model)
    trainer((rows(1), True))
    again = trainer_of(accel, resumed := net(1), flat=True, accumulate=2)
    again.resume(tmp_path)
    again((rows(1), True))
    same(resumed, model)
    loss_of(twin, (rows(0), True)).backward()
    assert not torch.equal(twin[0].weight, model[0].weight)


def test_nothing_stays_on_the_parameters_when_the_trainer_is_gone(accel):
    model = net()
    trainer = trainer_of(accel, model, flat=True)
    trainer((rows(0), True))
    del trainer
    gc.collect()
    loss_of(model, (rows(0), True)).backward()
    assert model[0].weight.grad.untyped_storage().nbytes() == model[0].weight.nbytes
