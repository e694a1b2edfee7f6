"""Gradients of `loss.backward()` beside `trainer.backward(loss)`: refused in a window, dropped before one."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import nn

from accelcore import Policy, TrainingError

OPTIONS = {
    "flat": {"flat": True},
    "not flat": {"flat": False},
    "fp16": {"precision": "fp16"},
    "masters": {"precision": Policy(autocast="bfloat16", model_dtype="bfloat16")},
}


def loss_of(model, rows):
    return model(rows).square().mean()


def make(accel, *, width=6, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    return accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1), loss=loss_of, **options)


def beside(trainer):
    """Call `backward` on a loss that reaches a part of the model only."""
    head = trainer.model[1]
    head(torch.ones(2, head.in_features).to(head.weight.dtype)).sum().backward()


def backward(trainer, number):
    rows = torch.randn(4, trainer.model[0].in_features, generator=torch.Generator().manual_seed(number))
    with trainer.autocast():
        loss = loss_of(trainer.forward, rows)
    trainer.backward(loss)


def step(trainer, number):
    backward(trainer, number)
    trainer.update()


def alike(one, other):
    return all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.mark.parametrize("width", [6, 300])  # large gradients are copied into flat memory within backward
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_a_window_they_are_refused_and_the_next_window_is_clean(accel, options, accumulate, width, tmp_path):
    trainer, other = (make(accel, width=width, accumulate=accumulate, **options) for _ in range(2))
    for each in (trainer, other):
        for number in range(accumulate):
            step(each, number)
    backward(trainer, 5)
    beside(trainer)
    with pytest.raises(TrainingError, match=r"parameter '1\.\w+'"):
        trainer.save(tmp_path)
    with pytest.raises(TrainingError, match=r"parameter '1\.\w+'(.|\n)*add the losses up"):
        step(trainer, 6) if accumulate > 1 else trainer.update()
    for number in range(accumulate):
        step(trainer, number)
        step(other, number)
    assert alike(trainer, other)


@pytest.mark.parametrize("ends", [lambda trainer: trainer(torch.ones(4, 6)), lambda trainer: trainer.flush()])
def test_between_two_calls_of_the_trainer_they_are_refused(accel, ends):
    trainer = make(accel, accumulate=2)
    trainer(torch.ones(4, 6))
    beside(trainer)
    with pytest.raises(TrainingError, match="add the losses up"):
        ends(trainer)


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_before_a_window_they_are_dropped_with_one_warning_unless_the_script_clears_them(
    accel, options, cleared, caplog
):
    trainer, other = make(accel, **options), make(accel, **options)
    caplog.clear()
    for number in range(3):
        beside(trainer)
        if cleared:
            trainer.model.zero_grad()
        trainer(torch.full((4, 6), 1.0 + number)) if number else step(trainer, number)
        other(torch.full((4, 6), 1.0 + number)) if number else step(other, number)
    assert alike(trainer, other)
    assert ["'1." in record.getMessage() for record in caplog.records] == [True] * (not cleared)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("flat", [True, False])
def test_a_script_may_write_to_gradients_and_compute_others_by_autograd(accel, flat, accumulate, caplog):
    """Halving the gradients of each update is a learning rate of a half."""
    trainer, other = (make(accel, flat=flat, accumulate=accumulate) for _ in range(2))
    other.optimizer.param_groups[0]["lr"] = 0.05
    for number in range(4):
        for each in (trainer, other):
            backward(each, number)
            if each is trainer and number % accumulate == accumulate - 1:
                for parameter in each.model.parameters():
                    parameter.grad.mul_(0.5)
                torch.autograd.grad(loss_of(each.model, torch.ones(2, 6)), list(each.model.parameters()))
            each.update()
    assert alike(trainer, other)
    assert not caplog.records


def test_a_trainer_takes_another_ones_backward_pass_for_no_foreign_one(accel, caplog):
    """Here with a window of the one open. A plain pass through what the other trains is found in both directions."""
    encoder, critic = nn.Linear(6, 6), make(accel, accumulate=2)
    generator = accel.trainer(encoder, accel.optimizers.create("sgd", encoder.parameters(), lr=0.1))
    for _ in range(2):
        critic(torch.ones(4, 6))
        generator.backward(loss_of(critic.model, generator.forward(torch.ones(4, 6))))
        generator.update()
    assert not caplog.records
    loss_of(critic.model, encoder(torch.ones(4, 6))).backward()
    generator.backward(loss_of(critic.model, generator.forward(torch.ones(4, 6))))
    critic(torch.ones(4, 6))
    assert [name in caplog.text for name in ("'weight'", "'bias'", "'1.bias'")].count(True) == 2


def test_a_pass_between_two_windows_of_one_call_each_is_dropped_with_one_warning(accel, caplog):
    trainer = make(accel)
    for _ in range(3):
        trainer(torch.ones(4, 6))
        assert not caplog.records
    for _ in range(2):
        beside(trainer)
        trainer(torch.ones(4, 6))
    assert ["'1.weight'" in record.getMessage() for record in caplog.records] == [True]


def test_a_pass_before_a_window_is_reported_by_a_trainer_that_shares_its_process(accel, caplog):
    trainer, other = make(accel), make(accel)
    for number in range(2):
        for each in (trainer, other):
            backward(each, number)
            each.update()
    loss_of(trainer.model, torch.ones(4, 6)).backward()
    backward(other, 2)
    other.update()
    assert not caplog.records
    backward(trainer, 2)
    assert "was dropped" in caplog.text


def test_a_gradient_from_before_the_trainer_is_no_mistake(accel, caplog):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    loss_of(model, torch.ones(4, 6)).backward()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1))
    trainer.backward(loss_of(model, torch.ones(4, 6)))
    trainer.update()
    assert not caplog.records


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_gradient_that_another_trainer_left_is_no_foreign_one(accel, caplog, in_thread):
    critic, generator = make(accel), make(accel)
    generator = accel.trainer(
        generator.model, generator.optimizer, loss=lambda model, rows: critic.model[0](model[0](rows)).sum()
    )
    if in_thread:
        thread = Thread(target=generator, args=[torch.ones(4, 6)])
        thread.start()
        thread.join()
    else:
        generator(torch.ones(4, 6))
        del generator
    assert critic.model[0].weight.grad is not None
    critic(torch.ones(4, 6))
    assert not caplog.records


def test_a_gradient_from_before_the_trainer_hides_no_later_one(accel, caplog):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    loss_of(model, torch.ones(4, 6)).backward()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1), loss=loss_of)
    trainer(torch.ones(4, 6))
    assert not caplog.records
    beside(trainer)
    trainer(torch.ones(4, 6))
    assert "'1." in caplog.text


def test_a_window_is_closed_between_an_update_and_the_next_micro_batch(accel):
    trainer, found = make(accel, accumulate=2), []
    for number in range(4):
        found.append(trainer.window_closed)
        trainer(torch.ones(4, 6)) if number < 2 else step(trainer, number)
    assert [*found, trainer.window_closed] == [True, False, True, False, True]
    backward(trainer, 4)
    assert not trainer.window_closed
