"""A schedule that is over says so at each window, and training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def loss_of(model, batch):
    return model(batch).square().mean()


def test_a_schedule_past_its_end_raises_at_each_window_and_training_goes_on_at_its_last_rate(accel, tmp_path):
    def make(parameters, create):
        optimizer = create(parameters)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3, cycle_momentum=False)

    model, hand = nn.Linear(3, 2), nn.Linear(3, 2)
    hand.load_state_dict(model.state_dict())
    optimizer, schedule = make(model.parameters(), lambda p: accel.optimizers.create("adamw", p, eps=1e-3))
    trainer = accel.trainer(model, optimizer, loss=loss_of, scheduler=schedule, accumulate=2)
    theirs, other = make(hand.parameters(), lambda p: torch.optim.AdamW(p, eps=1e-3, fused=True))
    windows = torch.randn(6, 2, 4, 3, generator=torch.Generator().manual_seed(1))
    for number, window in enumerate(windows, start=1):
        theirs.zero_grad()
        for batch in window:
            (loss_of(hand, batch) / 2).backward()
        theirs.step()
        trainer(window[0])
        if number < 4:
            other.step()
            trainer(window[1])
        else:
            with pytest.raises(ValueError, match="Tried to step"):
                trainer(window[1])
        assert trainer.steps == number
        for one, its in zip(model.parameters(), hand.parameters(), strict=True):
            torch.testing.assert_close(one, its)
    fresh = nn.Linear(3, 2)
    optimizer, schedule = make(fresh.parameters(), lambda p: accel.optimizers.create("adamw", p, eps=1e-3))
    resumed = accel.trainer(fresh, optimizer, loss=loss_of, scheduler=schedule, accumulate=2)
    trainer.save(tmp_path)
    resumed.resume(tmp_path)
    assert torch.equal(fresh.weight, model.weight)
    resumed(windows[0][0])
    with pytest.raises(ValueError, match="Tried to step"):
        resumed(windows[0][1])
    assert resumed.steps == len(windows) + 1


def test_a_scheduler_that_is_stepped_by_hand_may_be_made_after_the_resume(accel, tmp_path, caplog):
    def make():
        model = nn.Linear(3, 2)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.5)
        return accel.trainer(model, optimizer, loss=loss_of), optimizer

    trainer, optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    trainer(torch.randn(4, 3))
    trainer.save(tmp_path)
    resumed, fresh = make()
    resumed.resume(tmp_path)
    assert "initial_lr" in caplog.text
    assert torch.equal(resumed.model.weight, trainer.model.weight)
    torch.optim.lr_scheduler.StepLR(fresh, 3)
    assert fresh.param_groups[0]["initial_lr"] == 0.5
