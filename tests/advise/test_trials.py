"""A trial runs the script in a process of its own, and its record says why it ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accelcore.advise import trials
from accelcore.advise.trials import Outcome, Script, Variant, try_script
from accelcore.util import child_process
from accelcore.util.child_process import Ended

SCRIPT = """
import torch, accelcore
accel = accelcore.select("cpu")
accel.runtime.seed(0)
model = torch.nn.Linear(4, 1)
trainer = accel.trainer(
    model, accel.optimizers.create("sgd", model.parameters(), lr=0.1),
    loss=lambda model, batch: model(batch).square().mean(), precision="bf16",
)
batches = [torch.randn(8, 4) for _ in range(30)]
for epoch in trainer.epochs(1):
    for batch in trainer.batches(batches):
        trainer(batch)
print("the script went on")
"""


def test_an_unchanged_script_is_tried(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    found = try_script(Script([str(tmp_path / "train.py")], 12, 100), Variant("fp32", {"precision": "fp32"}))
    assert found.failure == ""
    assert (len(found.losses), len(found.seconds), len(found.overflows)) == (12, 11, 12)
    assert found.losses[-1] < found.losses[0]
    assert found.about["overridden"] == ["precision='bf16'"]
    assert found.memory > 2**20


@pytest.mark.parametrize(
    ("lines", "ended", "why"),
    [
        ([], Ended(0, 9, 1, "", ""), "no trainer"),
        ([{"trainer": 0, "device": "cpu"}], Ended(0, 9, 1, "", ""), "0 of 5"),
        ([], Ended(1, 9, 1, "", "Traceback\nValueError: mine"), "ValueError: mine"),
        ([], Ended(3, 9, 1, "", ""), "exit code 3"),
        ([], Ended(-11, 9, 1, "", ""), "SIGSEGV"),
        ([], Ended(None, 9, 1, "", ""), "no step for 9 seconds"),
    ],
)
def test_the_record_of_a_trial_that_fails_says_why(monkeypatch, lines, ended, why):
    def call(*command, environ, limit, progress):
        progress.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"trainer": 0, "st')
        return ended

    monkeypatch.setattr(child_process, "call", call)
    found = try_script(Script(["train.py"], 5, 9), Variant("fp32", {}))
    assert isinstance(found, Outcome)
    assert why in found.failure


def test_a_script_with_two_trainers_is_compared_by_the_first(monkeypatch):
    lines = [
        {"trainer": 0, "device": "cpu"},
        {"trainer": 1, "device": "cpu"},
        {"trainer": 1, "step": 1, "loss": 9.0, "seconds": None, "overflow": False},
        {"trainer": 0, "step": 1, "loss": 1.0, "seconds": None, "overflow": False},
        {"trainer": 1, "done": 1, "memory": 7},
    ]

    def call(*command, environ, limit, progress):
        assert trials.TRIAL in environ
        assert trials.TRIAL not in os.environ
        progress.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Ended(0, limit, 1, "", "")

    monkeypatch.setattr(child_process, "call", call)
    found = try_script(Script(["train.py"], 1, 9), Variant("fp32", {}))
    assert (found.trainers, found.losses, found.memory, found.failure) == (2, [1.0], 7, "")
