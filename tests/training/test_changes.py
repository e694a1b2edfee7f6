"""What changes after a trainer was made is noticed, and followed with the right numbers by refresh, or refused."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import toys
from thinned import pairwise
from torch import nn
from toys import OPTIMIZERS, loss_of

import accelcore


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(x + self.added(x) if hasattr(self, "added") else x)


data = partial(toys.data, shape=(4, 3, 2))
HOW = pytest.mark.parametrize("kind", OPTIMIZERS)
FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])
ACCUMULATE = 2


def make(accel, kind, flat, **options):
    model = Model()
    optimizer = OPTIMIZERS[kind](accel, model.parameters())
    return accel.trainer(model, optimizer, loss=loss_of, accumulate=ACCUMULATE, flat=flat, **options)


class Hand:
    def __init__(self):
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, eps=1e-3, fused=True)

    def train(self, batches):
        for number, batch in enumerate(batches):
            if number % ACCUMULATE == 0:
                self.optimizer.zero_grad()
            (loss_of(self.model, batch) / ACCUMULATE).backward()
            if number % ACCUMULATE == ACCUMULATE - 1:
                self.optimizer.step()


def train(trainer, batches, *, calls="one call"):
    for batch in batches:
        if calls == "one call":
            trainer(batch)
        else:
            trainer.backward(loss_of(trainer.forward if calls == "three calls" else trainer.model, batch))
            trainer.update()


def same(one, other):
    for (name, mine), (_, its) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def refreshed(trainer, *changes):
    for change in changes:
        change(trainer.model, trainer.optimizer)
    trainer.refresh()


def freeze(model, optimizer):
    model.middle.requires_grad_(False)


def unfreeze(model, optimizer):
    model.middle.requires_grad_(True)


def add(model, optimizer):
    torch.manual_seed(9)
    model.added = nn.Linear(4, 4)
    optimizer.add_param_group({"params": model.added.parameters(), "lr": 0.01})


CALLS = ("one call", "three calls", "around trainer.forward")


@pytest.mark.parametrize(
    ("kind", "flat", "calls", "changes"),
    pairwise(OPTIMIZERS, (True, False), CALLS, ([freeze], [freeze, unfreeze], [add], [freeze, add, unfreeze])),
)
def test_what_is_frozen_unfrozen_or_added_is_followed_by_refresh(accel, tmp_path, kind, flat, calls, changes):
    trainer, hand = make(accel, kind, flat), Hand()
    feed = data(4 * (len(changes) + 1))
    train(trainer, feed[:4], calls=calls)
    hand.train(feed[:4])
    for number, change in enumerate(changes, start=1):
        change(trainer.model, trainer.optimizer)
        with pytest.raises(accelcore.TrainingError, match=r"(?s)(middle\.weight|added\.weight).*trainer\.refresh"):
            train(trainer, feed[:1], calls=calls)
        trainer.refresh()
        change(hand.model, hand.optimizer)
        train(trainer, feed[4 * number : 4 * number + 4], calls=calls)
        hand.train(feed[4 * number : 4 * number + 4])
    same(trainer.model, hand.model)

    # Also what was saved of it, whatever is frozen by then.
    trainer.save(tmp_path)
    resumed = make(accel, kind, flat)
    refreshed(resumed, *changes)
    resumed.resume(tmp_path)
    refreshed(resumed, unfreeze)
    unfreeze(hand.model, None)
    train(resumed, feed[:4], calls=calls)
    hand.train(feed[:4])
    same(resumed.model, hand.model)


@pytest.mark.parametrize(("kind", "flat", "calls"), pairwise(OPTIMIZERS, (True, False), CALLS))
def test_a_change_within_a_window_raises_at_its_end_and_drops_it(accel, kind, flat, calls):
    trainer, hand = make(accel, kind, flat), Hand()
    feed = data(6)
    train(trainer, feed[:1], calls=calls)
    freeze(trainer.model, None)
    with pytest.raises(accelcore.TrainingError, match="1 of 2"):
        trainer.refresh()
    with pytest.raises(accelcore.TrainingError, match=r"'middle\.weight' was frozen"):
        train(trainer, feed[1:2], calls=calls)
    trainer.refresh()
    freeze(hand.model, None)
    train(trainer, feed[2:], calls=calls)
    hand.train(feed[2:])
    same(trainer.model, hand.model)


def test_a_change_between_two_epochs_is_noticed_when_the_next_begins(accel):
    trainer = make(accel, next(iter(OPTIMIZERS)), True)
    loader = data(2)
    for batch in trainer.batches(loader):
        trainer(batch)
    trainer.model.added = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(accelcore.TrainingError, match=r"(?s)'added\.weight' is new.*trainer\.refresh"):
        next(iter(trainer.batches(loader)))
    trainer.refresh()
    for batch in trainer.batches(loader):
        trainer(batch)
    trainer.model.middle = nn.Linear(4, 4)
    with pytest.raises(accelcore.TrainingError, match=r"'middle\.weight' was removed or replaced"):
        next(iter(trainer.batches(loader)))


@HOW
def test_another_memory_format_is_refused_within_a_window_and_followed_by_refresh(accel, kind, caplog):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 2))

    feed = [(torch.randn(4, 2, 5, 5), torch.randn(4, 2)) for _ in range(6)]
    trainer, other = (
        accel.trainer(model, OPTIMIZERS[kind](accel, model.parameters()), loss=loss_of, accumulate=2, flat=False)
        for model in (net(), net())
    )
    for each in (trainer, other):
        train(each, feed[:2])
    trainer(feed[2])
    trainer.model.to(memory_format=torch.channels_last)
    with pytest.raises(accelcore.TrainingError, match="another memory layout"):
        trainer(feed[3])
    assert "has changed, and the window is dropped: it had 1 of 2" in caplog.text
    trainer.refresh()
    for each in (trainer, other):  # that window was dropped
        train(each, feed[4:])
    same(trainer.model, other.model)


@HOW
@FLAT
@pytest.mark.parametrize("change", ["replaced", "new and trained by nobody", "another parameter", "assigned"])
def test_another_model_is_refused_and_nothing_moves(accel, tmp_path, kind, flat, change):
    trainer = make(accel, kind, flat)
    model = trainer.model
    train(trainer, data(2))
    if change == "replaced":
        model.middle = nn.Linear(4, 4)
    elif change == "another parameter":
        model.middle.weight = nn.Parameter(torch.zeros(4, 4))
    elif change == "assigned":
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    else:
        model.added = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    calls = (
        lambda: next(iter(trainer.batches(data(2)))),
        lambda: trainer.refresh(),
        lambda: trainer.save(tmp_path),
        lambda: trainer.resume(tmp_path),
    )
    for call in calls * 2:
        with pytest.raises(accelcore.TrainingError, match="have changed since its trainer was made"):
            call()
    assert trainer.steps == 1
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


@HOW
@FLAT
def test_a_deleted_layer_is_no_longer_trained_and_cannot_be_saved(accel, tmp_path, kind, flat):
    trainer, hand = make(accel, kind, flat), Hand()
    train(trainer, data(6))
    hand.train(data(6))
    for model in (trainer.model, hand.model):
        model.forward = lambda x, model=model: model.last(torch.tanh(model.first(x)))
        del model.middle
    with pytest.raises(accelcore.TrainingError, match=r"middle\.weight"):
        train(trainer, data(2, seed=3))  # window 4
    hand.train(data(2, seed=3))
    same(trainer.model, hand.model)
    with pytest.raises(accelcore.TrainingError, match=r"middle\.weight"):
        trainer.save(tmp_path)


@pytest.mark.parametrize("windows", [0, 1, 5, 64, 100])
@pytest.mark.parametrize("change", ["parameter", "layer", "frozen layer"])
def test_a_loop_without_epochs_notices_another_layer_at_a_power_of_two_or_every_64th_window(accel, windows, change):
    model = nn.Sequential(nn.Linear(2, 1))
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=lambda model, x: model(x).sum())
    for _ in range(windows):
        trainer(torch.ones(1, 2))
    if change == "parameter":
        model[0].weight = nn.Parameter(torch.zeros(1, 2))
    else:
        model.append(nn.Linear(1, 1).requires_grad_(change == "layer"))
    name = r"'0\.weight' was removed or replaced" if change == "parameter" else r"'1\.(weight|bias)' is new"
    with pytest.raises(accelcore.TrainingError, match=name):  # noqa: PT012
        for _ in range(64):
            trainer(torch.ones(1, 2))
    assert trainer.steps == {0: 1, 1: 2, 5: 8, 64: 128, 100: 128}[windows]


@HOW
@FLAT
@pytest.mark.parametrize("change", [freeze, add], ids=["freeze", "add"])
def test_a_rollback_after_a_change_restores_what_was_saved_or_is_refused(accel, tmp_path, kind, flat, change):
    trainer, hand = make(accel, kind, flat), Hand()
    feed = data(8)
    train(trainer, feed[:4])
    hand.train(feed[:4])
    trainer.save(tmp_path)
    refreshed(trainer, change)
    if change is add:
        with pytest.raises(accelcore.CheckpointError):
            trainer.resume(tmp_path)
        train(trainer, feed[4:])
        change(hand.model, hand.optimizer)
        hand.train(feed[4:])
    else:
        train(trainer, feed[4:])
        refreshed(trainer, unfreeze)
        trainer.resume(tmp_path)
        train(trainer, feed[4:])
        hand.train(feed[4:])
    same(trainer.model, hand.model)


@HOW
@FLAT
def test_a_resume_right_after_a_group_was_added_restores_its_state_too(accel, tmp_path, kind, flat):
    trainer, hand = make(accel, kind, flat), Hand()
    train(trainer, data(2))
    hand.train(data(2))
    refreshed(trainer, add)
    add(hand.model, hand.optimizer)
    assert trainer.save(tmp_path).is_dir()  # also before the first step of what was added
    train(trainer, data(4))
    hand.train(data(4))
    trainer.save(tmp_path)
    resumed = make(accel, kind, flat)
    refreshed(resumed, add)
    train(resumed, data(1))  # and within a window
    resumed.resume(tmp_path)
    train(resumed, data(4, seed=2))
    hand.train(data(4, seed=2))
    same(resumed.model, hand.model)
