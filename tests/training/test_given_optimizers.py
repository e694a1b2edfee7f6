"""An optimizer of torch's own that is given to a trainer: updates, hooks, labels and state are as by its `step`."""

from __future__ import annotations

from copy import deepcopy
from functools import wraps
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

import accelcore
from accelcore import LossScale

SHORT = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True, "betas": (0.8, 0.9)}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "eps": 1e-4}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]
"""Whose kernel a trainer calls without their `step`."""
WHOLE = [
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": False}),
    (torch.optim.Adam, {"lr": 1e-2, "fused": False, "foreach": True}),
]
ADAMW = (torch.optim.AdamW, {"lr": 1e-2})


class Pair:
    """A model that a trainer trains, and its twin, which a loop by hand trains on the same batches."""

    def __init__(self, accel, kind, options, **how):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        self.batches = [(torch.randn(6, 5), torch.randn(6, 2)) for _ in range(3)]
        self.twin = deepcopy(self.model)
        self.optimizer, self.hand = (_optimizer(model, kind, options) for model in (self.model, self.twin))
        self.trainer = accel.trainer(self.model, self.optimizer, loss=_loss, **how)

    def train(self, *, after=lambda optimizer: None):
        """Both on every batch once, with `after` each; how many of the trainer's windows went through torch's step."""
        kind = type(self.optimizer)
        with patch.object(kind, "_init_group", autospec=True, side_effect=kind._init_group) as looked:
            for batch in self.batches:
                self.trainer(batch)
                after(self.optimizer)
        for batch in self.batches:
            self.hand.zero_grad()
            _loss(self.twin, batch).backward()
            self.hand.step()
            after(self.hand)
        self.check()
        return looked.call_count / len(self.optimizer.param_groups)

    def check(self):
        """That weights, state and groups are those of the twin, bit for bit."""
        assert _all_equal(list(self.model.parameters()), list(self.twin.parameters()))
        ours, theirs = self.optimizer.state_dict(), self.hand.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, entry in theirs["state"].items():
            found = ours["state"][number]
            assert found.keys() == entry.keys()
            assert all(value is found[key] is None or torch.equal(found[key], value) for key, value in entry.items())


def _optimizer(model, kind, options):
    first, *rest = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.05}, {"params": rest}]
    return kind(groups, **{"fused": True, **options})


def _loss(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def _all_equal(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("kind", "options"), SHORT, ids=str)
def test_what_a_fused_optimizer_of_torch_does_is_done_in_less_time(accel, kind, options):
    assert Pair(accel, kind, options).train() == 0


@pytest.mark.parametrize(("kind", "options"), WHOLE, ids=str)
def test_one_whose_step_is_more_than_the_kernel_goes_through_its_step(accel, kind, options):
    assert Pair(accel, kind, options).train() == 3


def test_hooks_of_the_optimizer_and_of_the_process_are_called_while_there_are_any(accel):
    pair, called = Pair(accel, *ADAMW), []
    assert pair.train() == 0
    for register in (
        pair.optimizer.register_step_pre_hook,
        pair.optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda optimizer, args, kwargs: called.append(optimizer))
        try:
            assert pair.train() == len(pair.batches)
        finally:
            handle.remove()
        assert called.count(pair.optimizer) == len(pair.batches), register
        called.clear()
    assert pair.train() == 0
    assert called == []


def test_a_profile_has_torchs_label(accel):
    pair = Pair(accel, *ADAMW)
    pair.train()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pair.trainer(pair.batches[0])
    assert "Optimizer.step#AdamW.step" in {event.key for event in recorded.key_averages()}


def test_a_step_that_was_replaced_is_called(accel):
    class Counting(torch.optim.AdamW):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    derived = Pair(accel, Counting, {"lr": 1e-2})
    assert derived.train() == len(derived.batches)
    assert derived.optimizer.steps == len(derived.batches)

    pair, calls = Pair(accel, *ADAMW), []
    assert pair.train() == 0
    step = pair.optimizer.step
    pair.optimizer.step = lambda: (calls.append(1), step())
    assert pair.train() == len(pair.batches)
    assert len(calls) == len(pair.batches)

    original = torch.optim.SGD.step

    def counted(optimizer, closure=None):
        calls.append(optimizer)
        return original(optimizer, closure)

    for step in (counted, wraps(original)(counted)):
        with patch.object(torch.optim.SGD, "step", step):
            replaced = Pair(accel, torch.optim.SGD, {"lr": 1e-2})
            replaced.trainer(replaced.batches[0])
            assert calls[-1] is replaced.optimizer


def test_a_scheduler_that_is_stepped_before_the_optimizer_is_warned_about(accel):
    pair = Pair(accel, *ADAMW)
    pair.train()
    schedule = StepLR(pair.optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_keys_and_options_of_the_owners_own_are_let_alone(accel):
    pair = Pair(accel, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})
    for optimizer in (pair.optimizer, pair.hand):
        for number, group in enumerate(optimizer.param_groups):
            group["mine"] = [torch.ones(2)]
            for parameter in group["params"]:
                optimizer.state[parameter]["number"] = torch.tensor(number)
    for batch in pair.batches:
        pair.trainer(batch)
        pair.hand.zero_grad()
        _loss(pair.twin, batch).backward()
        pair.hand.step()
    assert _all_equal(list(pair.model.parameters()), list(pair.twin.parameters()))
    assert [int(entry["number"]) for entry in pair.optimizer.state.values()] == [0, 1, 1, 1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_scheduler_made_before_the_trainer_or_after_it_is_followed_without_a_warning(accel, moment):
    pair = Pair(accel, *ADAMW)
    if moment == "before":
        schedules = [StepLR(optimizer, 1, 0.5) for optimizer in (pair.optimizer, pair.hand)]
        pair.trainer = accel.trainer(pair.model, pair.optimizer, loss=_loss)
    else:
        schedules = [StepLR(optimizer, 1, 0.5) for optimizer in (pair.optimizer, pair.hand)]
    by_optimizer = {id(schedule.optimizer): schedule for schedule in schedules}
    # torch's schedulers wait to see one step.
    assert pair.train(after=lambda optimizer: by_optimizer[id(optimizer)].step()) == 1
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 2 ** len(pair.batches))


def test_its_owner_may_step_it_change_it_and_load_it_at_any_time(accel):
    pair = Pair(accel, *ADAMW)
    pair.train()
    saved = deepcopy(pair.hand.state_dict())
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.hand)):
        optimizer.zero_grad()
        _loss(model, pair.batches[0]).backward()
        optimizer.step()
        optimizer.param_groups[1].update(lr=3e-2, weight_decay=0.4)
    assert pair.train() == 0
    for optimizer in (pair.optimizer, pair.hand):
        optimizer.load_state_dict(deepcopy(saved))
    assert pair.train() == 0
    for optimizer in (pair.optimizer, pair.hand):
        for group in optimizer.param_groups:
            group["fused"] = False
    assert pair.train() == len(pair.batches)


def test_a_parameter_whose_first_gradient_comes_late_begins_then(accel):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.late = nn.Linear(5, 2), nn.Linear(5, 2)
            self.calls = 0

        def forward(self, inputs):
            self.calls += 1
            return self.first(inputs) + (self.late(inputs) if self.calls > 2 else 0)

    torch.manual_seed(0)
    model = Late()
    twin, batch = deepcopy(model), (torch.randn(4, 5), torch.randn(4, 2))
    optimizer, hand = (torch.optim.AdamW(each.parameters(), fused=True) for each in (model, twin))
    trainer = accel.trainer(model, optimizer, loss=_loss)
    for _ in range(4):
        trainer(batch)
        hand.zero_grad()
        _loss(twin, batch).backward()
        hand.step()
    assert optimizer.state[model.late.weight]["step"] == 2
    assert _all_equal(model.parameters(), twin.parameters())


def test_under_a_loss_scale_it_unscales_and_skips_as_torch_does(accel):
    pair = Pair(accel, *ADAMW, loss_scale=LossScale(init=256.0, interval=2))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    overflowing = (torch.full((6, 5), float("inf")), torch.zeros(6, 2))
    for batch in [*pair.batches, overflowing, *pair.batches]:
        pair.trainer(batch)
        pair.hand.zero_grad()
        scaler.scale(_loss(pair.twin, batch)).backward()
        scaler.step(pair.hand)
        scaler.update()
    pair.check()
    assert pair.trainer.skipped == 1
    assert pair.trainer.scaler.state_dict()["scale"] == scaler.get_scale()


@pytest.mark.parametrize("scale", [LossScale(init=256.0), 256.0], ids=["dynamic", "static"])
def test_gradients_that_the_script_unscales_are_not_unscaled_again(accel, scale):
    pair = Pair(accel, *ADAMW, loss_scale=scale)
    for batch in pair.batches:
        with pair.trainer.autocast():
            loss = _loss(pair.trainer.forward, batch)
        pair.trainer.backward(loss)
        pair.trainer.scaler.unscale_(pair.optimizer)
        pair.trainer.update()
        pair.hand.zero_grad()
        _loss(pair.twin, batch).backward()
        pair.hand.step()
    pair.check()


def test_a_group_may_be_empty():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
    trainer = accelcore.select("cpu").trainer(model, optimizer, loss=lambda model, rows: model(rows).sum())
    before = model.weight.tolist()
    trainer(torch.ones(1, 2))
    assert model.weight.tolist() == [pytest.approx([each - 0.1 for each in row]) for row in before]
