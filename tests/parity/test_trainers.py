"""Trainers of accelcore, recorded in a context and as observers: bits, compiled models, rounding, other precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import data, loss_of, net

import accelcore


def train(accel, change=lambda step, model: None, *, steps=4, observers=(), **options):
    accel.runtime.seed(0)
    model = nn.Sequential(*net(), nn.Dropout(0.1), nn.Linear(2, 2))
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
    trainer = accel.trainer(model, optimizer, loss=loss_of, observers=list(observers), **options)
    for step, batch in enumerate(data(steps), start=1):
        change(step, model)
        trainer(batch)
    return [tensor.clone() for tensor in model.state_dict().values()]


def train_by(accel, scheduler=None, *, lr=0.003, weight_decay=0.01, **options):
    """Train three epochs of four batches, in another layout if `flat`."""
    accel.runtime.seed(0)
    model = nn.Sequential(*net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)
    trainer = accel.trainer(model, optimizer, loss=loss_of, scheduler=scheduler, **options)
    for _ in trainer.epochs(3):
        for batch in trainer.batches(data(4)):
            trainer(batch)


@pytest.mark.parametrize(
    ("changed", "phase", "item"),
    [
        ({"lr": 0.004}, "update", "learning rate of optimizer 0 group 0"),
        ({"scheduler": "cosine"}, "update", "learning rate of optimizer 0 group 0"),
        ({"weight_decay": 0.02}, "settings", "optimizer 0 group 0 weight_decay"),
        ({"clip_norm": 1e6}, "settings", "trainer clip_norm"),
        ({"clip_norm": 1e6, "flat": None}, "settings", "trainer clip_norm"),  # to the bit
        ({"weight": lambda batch: 8}, "settings", "trainer weight"),
        ({"lr": torch.tensor(0.003)}, None, None),
        ({"lr": torch.tensor(0.003), "flat": None}, None, None),
        ({"loss_scale": 1.0}, None, None),
    ],
)
def test_another_setting_of_what_is_trained_never_agrees(accel, tmp_path, changed, phase, item):
    with accelcore.Record(tmp_path / "ref"):
        train_by(accel, **{"scheduler": "linear"} if "scheduler" in changed else {})
    with accelcore.Replay(tmp_path / "ref") as replay:
        train_by(accel, **{"flat": True, **changed})
    found = replay.result
    assert (found.agrees, found.phase, found.item) == (phase is None, phase, item), found
    if phase == "settings":
        assert "two trainings" in str(found)
        assert item in str(found)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"clip_norm": 1.0, "accumulate": 2}, {"flat": True}])
def test_a_recorded_training_has_the_bits_of_a_plain_one_and_replays(accel, tmp_path, options):
    plain = train(accel, **options)
    with accelcore.Record(tmp_path / "ref"):
        assert equal(plain, train(accel, **options))
    with accelcore.Replay(tmp_path / "ref") as replay:
        assert equal(plain, train(accel, **options))
    assert replay.result.agrees, replay.result
    assert replay.result.exact
    assert replay.result.steps == 4 // options.get("accumulate", 1)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"precision": "bf16"}, "precision"),
        ({"precision": "fp16"}, "precision"),  # gradients of a scaled loss
        ({"precision": "O2"}, "precision"),
        ({"loss_scale": 3.0}, "loss_scale"),
        ({"flat": True}, "flat"),  # its optimizer clips while it updates
    ],
)
def test_other_options_agree_up_to_rounding_and_are_named_among_the_settings(accel, tmp_path, options, setting):
    with accelcore.Record(tmp_path / "ref"):
        train(accel, clip_norm=0.1)
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(accel, clip_norm=0.1, **options)
    assert replay.result.agrees, replay.result
    assert not replay.result.exact
    assert f"trainer {setting}" in [each.name for each in replay.result.settings]


@pytest.mark.parametrize("options", [{"loss_scale": 4.0}, {"flat": True}])
def test_a_wrong_gradient_is_named_under_another_loss_scale_and_layout_too(accel, tmp_path, options):
    def double(step, model):
        if step == 2:
            model[-1].weight.register_hook(lambda gradient: 2 * gradient)

    with accelcore.Record(tmp_path / "ref"):
        train(accel, clip_norm=0.1)
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(accel, double, clip_norm=0.1, **options)
    assert (replay.result.phase, replay.result.step, replay.result.module) == ("backward", 2, "5"), replay.result


def test_lost_statistics_of_batchnorm_are_named_under_rounding_too(accel, tmp_path):
    def change(step, model):
        if step == 3:
            model[1].running_mean.zero_()

    with accelcore.Record(tmp_path / "ref"):
        train(accel)
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(accel, change, flat=True)
    assert (replay.result.phase, replay.result.step, replay.result.module) == ("weights", 3, "1")


def test_an_observer_records_without_a_context(accel, tmp_path):
    record = accelcore.Record(tmp_path / "ref")
    train(accel, observers=[record])
    record.close()
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(accel)
    assert replay.result.agrees, replay.result


def resumed(accel, checkpoints, steps):
    """Resume, train some steps and save, keeping one checkpoint."""
    accel.runtime.seed(0)
    model = nn.Sequential(*net())
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), lr=0.01), loss=loss_of)
    trainer.resume(checkpoints)
    for batch in data(steps):
        trainer(batch)
    trainer.save(checkpoints, keep=1)


@pytest.mark.parametrize("earlier", [0, 2])
def test_a_replay_begins_where_the_recorded_run_began_and_saves_nothing(accel, tmp_path, earlier):
    checkpoints, reference = tmp_path / "checkpoints", tmp_path / "ref"
    if earlier:
        resumed(accel, checkpoints, earlier)
    with accelcore.Record(reference):
        resumed(accel, checkpoints, 3)
    there = sorted(checkpoints.iterdir())
    assert [path.name for path in there] == [f"step-{steps:08d}" for steps in (earlier, earlier + 3) if steps]
    with accelcore.Replay(reference) as replay:
        resumed(accel, checkpoints, 3)
    assert replay.result.agrees, replay.result
    assert replay.result.exact
    assert replay.result.steps == 3
    assert sorted(checkpoints.iterdir()) == there
