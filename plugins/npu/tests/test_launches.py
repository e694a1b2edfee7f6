"""The cost of a training step on the emulated NPU, counted; by the benchmark beside the loop written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelcore_npu_emulator import counters
from torch import nn

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    output = tmp_path_factory.mktemp("launches") / "launches.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "launches", "--output", str(output)],
        capture_output=True, text=True, timeout=240, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EMULATED" in done.stdout
    return json.loads(output.read_text())["tables"]


def test_a_step_never_costs_more_than_by_hand(tables):
    assert len(tables) == 2
    for table in tables:
        assert len(table["goals"]) == 10
        assert all(goal["met"] for goal in table["goals"])


def test_what_follows_backward_does_not_grow_with_the_parameters(tables):
    """A layer more is a few operators in forward and backward, the same under every task; the update adds none."""
    small, large = ({row["case"]: row["counts"] for row in table["rows"]} for table in tables)

    def growth(case):
        return large[f"{case}: trainer"]["launches"] - small[f"{case}: trainer"]["launches"]

    assert growth("fp32, clipped") == growth("fp32")
    assert growth("fp16, dynamic loss scale") == growth("fp16, dynamic loss scale, clipped")
    assert growth("fp16, dynamic loss scale") <= growth("bf16")
    assert [large[f"{case}: trainer"]["synchronizations"] for case in ("fp32", "fp32, clipped", "bf16")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("precision", "clip_norm", "waits"),
    [("fp32", None, 0), ("fp32", 1.0, 0), ("bf16", 1.0, 0), ("fp16", None, 1), ("fp16", 1.0, 1)],
)
def test_an_update_launches_as_much_for_20_parameters_as_for_200(accel, precision, clip_norm, waits):
    """Gathering, unscaling, clipping, the optimizer and the scaler."""

    def cost(parameters):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-3)
        trainer = accel.trainer(model, optimizer, precision=precision, clip_norm=clip_norm)
        for _ in range(3):
            with trainer.autocast():
                loss = trainer.forward(torch.ones(4, 8, device=accel.device)).square().mean()
            trainer.backward(loss)
            with counters.count() as counted:
                trainer.update()
        assert len(list(model.parameters())) == parameters
        return counted.launches.total(), counted.synchronizations.total()

    small, large = cost(20), cost(200)
    assert small == large
    assert small[0] < 40
    assert small[1] == waits
