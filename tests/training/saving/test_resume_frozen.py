"""A resume of a run that has frozen or unfrozen parameters: the same losses, or a warning at the first step."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import accelcore

DATA = list(torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0)))


class Run:
    """A training of three layers; `trained` names those that are trained from the start."""

    def __init__(self, accel, trained="c", **options):
        torch.manual_seed(1)
        self.model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.model.forward = self.forward
        self.set(**{name: name in trained for name in "abc"})
        optimizer = accel.optimizers.create("adamw", self.model.parameters(), lr=0.1)
        self.trainer = accel.trainer(self.model, optimizer, loss=lambda model, rows: model(rows).mean(), **options)

    def forward(self, rows):
        model = self.model
        return model["c"](torch.tanh(model["b"](torch.tanh(model["a"](rows.to(model["a"].weight.dtype)))))).square()

    def set(self, **layers):
        for name, trains in layers.items():
            self.model[name].requires_grad_(trains)

    def change(self, **layers):
        self.set(**layers)
        self.trainer.refresh()

    def train(self):
        return [self.trainer(rows).item() for rows in self.trainer.batches(DATA)]


def saved(accel, folder, *changes, **options):
    """Train an epoch after each change, save before the last one, and return the losses after it."""
    run = Run(accel, **options)
    run.train()
    for number, change in enumerate(changes, start=1):
        if number == len(changes):
            run.trainer.save(folder)
        if change:
            run.change(**change)
        losses = run.train()
    return losses


@pytest.mark.parametrize(
    ("changes", "trained", "says"),
    [
        (({"a": True}, {}), "c", "'a.bias' is frozen now, and was trained"),
        (({"c": False, "b": True}, {}), "c", "'b.bias' is frozen now, and was trained"),
        (({"c": False, "b": True}, {}), "bc", "'c.bias' is trained now, and was not"),
        (({}, {}), "c", ""),
    ],
)
def test_other_parameters_than_the_saved_runs_are_reported(accel, tmp_path, caplog, changes, trained, says):
    saved(accel, tmp_path, *changes)
    run = Run(accel, trained)
    caplog.clear()
    run.trainer.resume(tmp_path)
    run.train()
    found = [each.getMessage() for each in caplog.records if "when the checkpoint was saved" in each.getMessage()]
    assert [says in line and "epoch >= 1" in line for line in found] == [True] * bool(says)


@pytest.mark.parametrize("change", [{"a": True}, {"c": False, "b": True}])
def test_a_change_as_in_the_saved_run_gives_its_losses_and_no_warning(accel, tmp_path, caplog, change):
    expected = saved(accel, tmp_path, change, {})
    caplog.clear()
    run = Run(accel)
    run.trainer.resume(tmp_path)
    run.change(**change)
    assert run.train() == expected
    assert not caplog.records


@pytest.mark.parametrize("change", [{"b": True}, {"c": False, "a": True}])
def test_a_change_for_an_epoch_that_begins_after_the_checkpoint_gives_no_warning(accel, tmp_path, caplog, change):
    expected = saved(accel, tmp_path, change)
    caplog.clear()
    run = Run(accel)
    run.trainer.resume(tmp_path)
    run.change(**change)
    assert run.train() == expected
    assert not caplog.records


def test_masters_are_exact_if_the_checkpoint_is_resumed_again(accel, tmp_path):
    options = {"precision": accelcore.Policy(model_dtype=torch.bfloat16)}
    expected = saved(accel, tmp_path, {"b": True}, {}, **options)
    run = Run(accel, **options)
    run.trainer.resume(tmp_path)
    run.change(b=True)
    run.trainer.resume(tmp_path)
    assert run.train() == expected


def test_a_checkpoint_within_a_window_is_refused_at_once(accel, tmp_path):
    run = Run(accel, "bc", accumulate=2)
    run.trainer(DATA[0])
    run.trainer.save(tmp_path)
    expected = run.trainer(DATA[1]).item()
    again = Run(accel, accumulate=2)
    with pytest.raises(accelcore.CheckpointError, match=r"'b\.bias' is frozen now(.|\n)*window(.|\n)*refresh"):
        again.trainer.resume(tmp_path)
    again.change(b=True)
    again.trainer.resume(tmp_path)
    assert again.trainer(DATA[1]).item() == expected


def test_the_refusal_names_the_older_checkpoint_that_was_saved_between_two_windows(accel, tmp_path):
    run = Run(accel, accumulate=3)
    for _ in range(3):
        run.trainer(DATA[0])
    run.change(b=True)
    for _ in range(3):
        run.trainer(DATA[1])
    run.trainer.save(tmp_path)
    expected = []
    for _ in range(2):
        expected.append(run.trainer(DATA[2]).item())
        run.trainer.save(tmp_path)
    again = Run(accel, accumulate=3)
    with pytest.raises(accelcore.CheckpointError, match=r"trainer\.window_closed") as refused:
        again.trainer.resume(tmp_path)
    named = re.search(r'trainer\.resume\("(.+)"\)', str(refused.value))[1]
    assert again.trainer.resume(named) == tmp_path / "step-00000002"
    again.change(b=True)
    assert [again.trainer(DATA[2]).item() for _ in range(2)] == expected
