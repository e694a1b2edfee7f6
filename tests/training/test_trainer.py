"""One step, many options: each against the same loop written by hand in torch."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from toys import data, loss_of, net

import accelcore


def same(first: nn.Module, second: nn.Module, *, flat: bool = False) -> None:
    """Every tensor of the state, and the outputs in evaluation; flat, a kernel may round the last bit otherwise."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if flat else {"rtol": 0, "atol": 0}
    for (name, one), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, **tolerance, msg=name)
    inputs = data(1, seed=99)[0][0]
    torch.testing.assert_close(first.eval()(inputs), second.eval()(inputs), **tolerance)


@settings(max_examples=25, deadline=None)
@given(
    batches=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    clip_norm=st.one_of(st.none(), st.floats(0.01, 2.0)),
    scheduled=st.booleans(),
    how=st.sampled_from([("fp32", False), ("fp32", True), ("bf16", False)]),
)
def test_training_is_bit_equal_to_the_loop_written_by_hand(batches, accumulate, clip_norm, scheduled, how):
    precision, flat = how
    accel = accelcore.select("cpu")
    feed = data(batches)

    ours = net()
    route = "auto" if flat else "fused"  # a kernel that is not torch's rounds otherwise
    optimizer = accel.optimizers.create("adamw", ours.parameters(), lr=1e-2, eps=1e-3, route=route)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if scheduled else None
    trainer = accel.trainer(
        ours, optimizer, loss=loss_of, scheduler=schedule, precision=precision, accumulate=accumulate,
        clip_norm=clip_norm, flat=flat,
    )  # fmt: skip
    losses = [trainer(batch) for batch in trainer.batches(feed)]

    hand = net()
    optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-2, eps=1e-3, fused=True)  # eps: no step is made of rounding
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if scheduled else None
    expected = []
    for start in range(0, batches, accumulate):
        window = feed[start : start + accumulate]
        optimizer.zero_grad()
        for batch in window:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_of(hand, batch)
            expected.append(loss.detach())
            (loss / accumulate).backward()
        if len(window) < accumulate:
            for parameter in hand.parameters():
                parameter.grad *= accumulate / len(window)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(hand.parameters(), clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()

    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), **({} if flat else {"rtol": 0, "atol": 0}))
    assert trainer.steps == -(-batches // accumulate)
    same(ours, hand, flat=flat)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_window_that_is_flushed_is_the_mean_of_what_it_has(accel, micro_batches):
    # Without momentum or state, it equals a plain step on the mean loss.
    ours, hand = net(), net()
    batches = data(micro_batches)
    trainer = accel.trainer(ours, accel.optimizers.create("sgd", ours.parameters(), lr=0.1), loss=loss_of, accumulate=4)
    for batch in batches:
        trainer(batch)
    assert torch.equal(ours[0].weight, net()[0].weight)
    trainer.flush()
    trainer.flush()  # nothing is left: changes nothing
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1, fused=True)
    torch.stack([loss_of(hand, batch) for batch in batches]).mean().backward()
    optimizer.step()
    for one, other in zip(ours.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert trainer.steps == 1


def test_the_three_calls_are_the_one_call(accel):
    one, three = net(), net()
    trainer = accel.trainer(one, accel.optimizers.create("adam", one.parameters()), loss=loss_of, accumulate=2)
    by_hand = accel.trainer(three, accel.optimizers.create("adam", three.parameters()), accumulate=2)
    closed = []
    for batch in data(4):
        trainer(batch)
        with by_hand.autocast():
            loss = mse_loss(by_hand.forward(batch[0]), batch[1])
        by_hand.backward(loss)
        closed.append(by_hand.update())
    assert closed == [False, True, False, True]
    same(one, three)


@pytest.mark.parametrize(
    ("loss_scale", "theirs"),
    [
        (None, {}),
        (
            accelcore.LossScale(init=2.0**10, growth=4.0, backoff=0.25, interval=2),
            {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2},
        ),
    ],
    ids=["defaults", "settings"],
)
def test_fp16_trains_like_torch_with_its_own_scaler_and_counts_skipped_steps(accel, loss_scale, theirs):
    ours, hand = net(), net()
    feed = data(6)
    feed[2] = (feed[2][0] * 1e6, feed[2][1])  # beyond fp16
    trainer = accel.trainer(
        ours,
        accel.optimizers.create("adamw", ours.parameters(), lr=1e-2, route="fused"),
        loss=loss_of,
        precision="fp16",
        loss_scale=loss_scale,
        clip_norm=1.0,
    )
    for batch in feed:
        trainer(batch)

    optimizer = torch.optim.AdamW(hand.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", **theirs)
    for batch in feed:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(hand, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(hand.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert trainer.skipped >= 1
    assert trainer.scaler.state_dict()["scale"] == scaler.get_scale()
    for one, other in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(one, other)


def test_static_loss_scale_changes_no_result_in_fp32(accel):
    plain, scaled = net(), net()
    for model, loss_scale in ((plain, None), (scaled, 128.0)):
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
        trainer = accel.trainer(model, optimizer, loss=loss_of, loss_scale=loss_scale)
        for batch in data(3):
            trainer(batch)
    same(plain, scaled)  # 128 is a power of two: exact


def test_the_loss_is_detached_and_aux_is_kept(accel):
    model = net()
    trainer = accel.trainer(
        model, accel.optimizers.create("sgd", model.parameters()), loss=lambda m, batch: (loss_of(m, batch), "aux")
    )
    loss = trainer(data(1)[0])
    assert not loss.requires_grad
    assert trainer.aux == "aux"


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(2, 3)}, [torch.ones(2, 3)], (torch.ones(2, 3),), torch.ones(2, 3)], ids=type
)
def test_a_model_that_returns_its_loss_needs_no_loss_function(accel, batch):
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = Model(3, 1)
    before = model.weight.clone()
    accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1))(batch)
    assert not torch.equal(before, model.weight)


def test_frozen_and_unused_parameters_keep_no_gradient_and_do_not_move(accel):
    model = nn.ModuleDict({"used": nn.Linear(6, 2), "frozen": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trainer = accel.trainer(
        model,
        accel.optimizers.create("adamw", model.parameters(), lr=0.1, weight_decay=0.5),
        loss=lambda m, batch: mse_loss(m["frozen"](m["used"](batch[0])), batch[1]),
        accumulate=3,
    )
    for _ in trainer.batches(data(4)):
        trainer(_)
    assert torch.equal(before["unused.weight"], model["unused"].weight)  # no gradient is not a zero gradient
    assert torch.equal(before["frozen.weight"], model["frozen"].weight)
    assert not torch.equal(before["used.weight"], model["used"].weight)


def test_a_loader_that_raises_loses_nothing(accel):
    def loader():
        yield from data(2)
        raise OSError("the disk went away")

    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of)
    with pytest.raises(OSError, match="went away"):
        collections.deque(map(trainer, trainer.batches(loader())), maxlen=0)
    assert trainer.steps == 2
    trainer(data(1)[0])
    assert trainer.steps == 3


def test_aux_is_of_the_last_loss(accel):
    model = net()
    answers = iter([True, False])
    trainer = accel.trainer(
        model,
        accel.optimizers.create("sgd", model.parameters()),
        loss=lambda m, b: (loss_of(m, b), "first") if next(answers) else loss_of(m, b),
    )
    trainer(data(1)[0])
    assert trainer.aux == "first"
    trainer(data(1)[0])
    assert trainer.aux is None


class Rows:
    """A batch of a class of its own, with a method `to`."""

    def __init__(self, rows, device=None):
        self.rows, self.device = rows, device

    def to(self, device):
        return Rows(self.rows, device)


def test_a_batch_that_trainer_batches_did_not_yield_is_placed(accel):
    model, seen = torch.nn.Linear(4, 1), []

    def loss(model, batch):
        seen.append(batch["rows"].device)
        return model(batch["rows"].rows).sum()

    trainer = accel.trainer(model, torch.optim.SGD(model.parameters()), loss=loss)
    trainer({"rows": Rows(torch.ones(2, 4))})
    assert seen == [accel.device]
