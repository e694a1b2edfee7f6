"""Batches that are taken from a recording, and a batch that is run in smaller ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accelcore


class Task(nn.Module):
    """A model that takes its targets, by keyword, and returns its loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs, *, targets):
        return mse_loss(self.net(inputs), targets)


def train(order=(0, 1, 2), *, micro_batches=1, size=6):
    torch.manual_seed(0)
    model = Task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, size, 5)
    for number in order:
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(data[number, :, :4], targets=data[number, :, 4:]).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def reference(tmp_path):
    with accelcore.Record(tmp_path / "ref", batches=True):
        train()
    return tmp_path / "ref"


def replayed(reference, *given, **options):
    with accelcore.Replay(reference, **options) as replay:
        after = train(*given)
    return replay.result, after


def test_another_order_of_the_data_is_named_and_agrees_with_the_recorded_batches(reference):
    plain = train()
    found, _ = replayed(reference, (0, 2, 1))
    assert (found.phase, found.step, found.is_cause) == ("batch", 2, True)
    found, after = replayed(reference, (0, 2, 1), batches="take")
    assert found.agrees, found
    assert not found.exact  # the order of a kernel's sums depends on where a batch lies in memory
    torch.testing.assert_close(after, plain)
    assert "step 2" in found.notes[0]
    assert "targets" in found.notes[0]


def test_the_same_order_takes_nothing_that_is_to_be_noted(reference):
    found, _ = replayed(reference, batches="take")
    assert found.agrees
    assert found.exact
    assert not found.notes


def test_random_numbers_that_the_loader_draws_are_taken_too(reference):
    def other_loader():
        torch.manual_seed(0)
        model = Task()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            batch = torch.rand(6, 5)
            optimizer.zero_grad()
            model(batch[:, :4], targets=batch[:, 4:]).backward()
            optimizer.step()

    with accelcore.Replay(reference, batches="take") as replay:
        other_loader()
    assert replay.result.agrees, replay.result


def test_what_another_model_has_made_is_not_taken(tmp_path):
    def play(shift):
        torch.manual_seed(0)
        models = [nn.Linear(2, 3), nn.Linear(3, 1)]
        optimizer = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
        for _ in range(2):
            models[1](models[0](torch.randn(5, 2) + shift)).square().mean().backward()
            optimizer.step()
        return models[0].weight.grad is not None

    with accelcore.Record(tmp_path / "ref", batches=True):
        play(0.0)
    with accelcore.Replay(tmp_path / "ref", batches="take") as replay:
        assert play(1.0)
    assert replay.result.agrees, replay.result


def test_a_recording_without_batches_is_refused(tmp_path):
    with accelcore.Record(tmp_path / "ref"):
        train()
    with pytest.raises(accelcore.ConfigurationError, match="batches=True"):
        accelcore.Replay(tmp_path / "ref", batches="take")


def test_a_call_that_was_not_recorded_is_refused(reference):
    with (
        pytest.raises(accelcore.RecordingError, match="no batch for this call"),
        accelcore.Replay(reference, batches="take"),
    ):
        train(micro_batches=2)


class Centre(nn.Module):
    """Mixes the rows of a batch."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(("last", "named"), [(Centre(), "2.0"), (nn.Softmax(dim=-1), None)])
def test_the_first_module_that_mixes_rows_is_named(tmp_path, last, named):
    """The other modules compute each element by itself, in evaluation mode."""

    def play():
        torch.manual_seed(0)
        model = nn.Sequential(nn.PReLU(6), nn.Dropout(0.5), nn.Sequential(last, nn.Tanh()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(8, 6)).square().sum().backward()
            optimizer.step()
        assert all(module.training for module in model.modules())
        return model[0].weight.detach().clone()

    with accelcore.Record(tmp_path / "ref"):
        plain = play()
    with accelcore.Replay(tmp_path / "ref", batch=1) as replay:
        assert torch.equal(plain, play())
    found = replay.result
    assert (found.agrees, found.module) == (named is None, named)
    if named is not None:
        assert (found.phase, found.item) == ("batch size", "output 0")
        assert found.ratio > 8
        assert "2.0" in found.notes[0]


def test_a_batch_that_is_too_small_to_divide_is_refused(reference):
    with (
        pytest.raises(accelcore.ConfigurationError, match="6 rows"),
        accelcore.Replay(reference, batch=6),
    ):
        train()


def test_keyword_arguments_that_torch_does_not_show_are_refused(tmp_path):
    model = Task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(inputs=torch.ones(2, 4), targets=torch.ones(2, 1)).backward()
        optimizer.step()

    with pytest.raises(accelcore.ConfigurationError, match="model="), accelcore.Record(tmp_path / "ref"):
        step()
    with accelcore.Record(tmp_path / "ref", model=model, optimizer=optimizer):
        step()
    with accelcore.Replay(tmp_path / "ref", model=model, optimizer=optimizer, weights="take") as replay:
        step()
    assert replay.result.agrees, replay.result


def test_a_model_that_was_made_before_the_context_takes_batches_from_its_first_call_on(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())

    def play(data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    with accelcore.Record(tmp_path / "ref", batches=True):
        play(torch.ones(2, 4, 3))
    with accelcore.Replay(tmp_path / "ref", batches="take", weights="take") as replay:
        play(torch.zeros(2, 4, 3))
    assert replay.result.agrees, replay.result
    assert "step 1" in replay.result.notes[0]
