"""Schedules: by window, by the script; one that is over says so, and training goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import accelcore


def loss_of(model, batch):
    return model(batch).square().mean()


def test_a_schedule_past_its_end_raises_at_each_window_and_training_goes_on_at_its_last_rate(accel, tmp_path):
    def make(parameters, create):
        optimizer = create(parameters)
        return optimizer, OneCycleLR(optimizer, 0.1, total_steps=3, cycle_momentum=False)

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
            with pytest.raises(accelcore.TrainingError, match="Tried to step"):
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
    with pytest.raises(accelcore.TrainingError, match="Tried to step"):
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


BATCHES = list(torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1)))


def rates_by_hand(epochs):
    """The rate of each of the 3 windows of an epoch, by torch's own loop; the last is short."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, rates = StepLR(optimizer, step_size=2, gamma=0.5), []
    for _ in range(epochs):
        for _ in range(3):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        scheduler.step()
    return rates


class Rates(accelcore.Observer):
    """The rate by which each window was trained."""

    def __init__(self):
        self.seen, self.optimizer = [], None

    def step(self, steps):
        self.seen.append(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("create", ["ours", "torch's"])
@pytest.mark.parametrize("saved_after", [5, 7, 10], ids=["in the loop, at its last batch", "mid-epoch", "second end"])
def test_a_script_that_steps_after_each_epoch_has_torchs_rates_also_after_a_resume(
    accel, tmp_path, create, saved_after, recwarn
):
    def run(folder, *, save=None):
        model, rates = nn.Linear(3, 2), Rates()
        make = (
            torch.optim.SGD
            if create == "torch's"
            else lambda *given, **named: accel.optimizers.create("sgd", *given, **named)
        )
        rates.optimizer = optimizer = make(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
        trainer = accel.trainer(
            model, optimizer, loss=loss_of, scheduler=scheduler, schedule_by="script", accumulate=2, observers=[rates]
        )
        trainer.resume(folder)
        taken = before = 0
        for _ in trainer.epochs(5):
            for batch in trainer.batches(BATCHES):
                trainer(batch)
                taken += 1
                if taken == save:
                    trainer.save(folder)
                    before = len(rates.seen)
            scheduler.step()
        return rates.seen, before

    seen, before = run(tmp_path, save=saved_after)
    rest, _ = run(tmp_path)
    assert seen[:before] + rest == seen == rates_by_hand(5)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def scheduled(accel, make=lambda optimizer: StepLR(optimizer, 2), **options):
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    return accel.trainer(model, optimizer, loss=loss_of, scheduler=make(optimizer), **options)


def warmed_up(optimizer):
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)]
    return SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, 2),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "sequence": warmed_up,
    "chain": lambda optimizer: ChainedScheduler([StepLR(optimizer, 2), LinearLR(optimizer)]),
    "chain of a sequence": lambda optimizer: ChainedScheduler([warmed_up(optimizer), StepLR(optimizer, 2)]),
}
MOVED = r'last_epoch=\d+, .* expects \d+\n.*each window.*\n.*schedule_by="script"'


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_that_the_script_steps_too_is_said_at_once_and_one_that_it_does_not_never(accel, tmp_path, make):
    trainer = scheduled(accel, make, accumulate=2)
    for _ in range(3):  # before training the script does what it likes
        trainer.scheduler.step()
    for _ in range(4):
        trainer(BATCHES[0]), trainer(BATCHES[1])
    trainer.save(tmp_path)
    for _ in range(3):
        trainer(BATCHES[0]), trainer(BATCHES[1])
    resumed = scheduled(accel, make, accumulate=2)
    resumed.resume(tmp_path)
    resumed.scheduler.step()  # again before training
    resumed(BATCHES[0]), resumed(BATCHES[1])
    resumed.resume(tmp_path)
    resumed(BATCHES[0]), resumed(BATCHES[1])

    for each in (trainer, resumed):
        steps = each.steps
        each.scheduler.step()
        each(BATCHES[0])
        with pytest.raises(accelcore.TrainingError, match=MOVED):
            each(BATCHES[1])
        assert each.steps == steps + 1  # this window was trained


def test_a_scheduler_of_another_make_is_left_to_count_as_it_likes(accel):
    class Halving:
        def __init__(self, optimizer):
            self.optimizer, self.times = optimizer, 0

        def step(self):
            self.times += 1

        def state_dict(self):
            return {"times": self.times}

        def load_state_dict(self, state):
            self.times = state["times"]

    trainer = scheduled(accel, Halving)
    for _ in range(3):
        trainer(BATCHES[0])
    assert trainer.scheduler.times == 3


def test_a_step_of_the_scripts_is_said_before_it_is_saved(accel, tmp_path):
    trainer = scheduled(accel)
    trainer(BATCHES[0])
    trainer.scheduler.step()
    with pytest.raises(accelcore.TrainingError, match=MOVED):
        trainer.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("by", "other"), [("window", "script"), ("script", "window")])
def test_it_resumes_as_it_was_stepped(accel, tmp_path, by, other):
    def make(by):
        model = nn.Linear(3, 2)
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
        return accel.trainer(model, optimizer, loss=loss_of, scheduler=StepLR(optimizer, 1), schedule_by=by)

    make(by).save(tmp_path)
    make(by).resume(tmp_path)
    with pytest.raises(accelcore.CheckpointError, match=rf"by the {by}, .* by the {other}\n.*schedule_by="):
        make(other).resume(tmp_path)


def test_a_scheduler_that_the_script_steps_is_saved_and_restored(accel, tmp_path, caplog):
    def make():
        model = nn.Linear(3, 2)
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return accel.trainer(model, optimizer, loss=loss_of, scheduler=plateau, schedule_by="script")

    trainer, resumed = make(), make()
    for metric in (1.0, 2.0, 3.0):
        trainer(BATCHES[0])
        trainer.scheduler.step(metric)
    trainer.save(tmp_path)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.025
    resumed.resume(tmp_path)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.025
    assert resumed.scheduler.state_dict() == trainer.scheduler.state_dict()
    assert "learning rate is" not in caplog.text  # the schedule has changed it, and not the script
    resumed.scheduler.step(4.0)
    assert resumed.optimizer.param_groups[0]["lr"] == 0.0125
