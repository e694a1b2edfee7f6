"""The examples, unchanged, on the GPU and on the CPU: the same losses, the same result.

The run on the CPU is the oracle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_GPT = ("--context", "32", "--width", "64", "--layers", "1", "--batch-size", "8", "--accumulate", "2")
GPT = (*SMALL_GPT, "--steps", "40", "--log-every", "5", "--checkpoint-every", "20")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run an example once for each device and set of arguments: the entries that it logged, and its summary."""

    @cache
    def once(device, script, *arguments):
        folder = tmp_path_factory.mktemp("out")
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / script), *arguments, "--output", str(folder)],
            capture_output=True, text=True, timeout=100,
            env={**os.environ, "ACCEL_DEVICE": device, "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: too short a run to reach the example's goal
        *entries, last = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return entries, last["summary"]

    return once


def column(entries, name):
    return [entry[name] for entry in entries if name in entry]


def test_gpt(run, needs):
    needs("safetensors")
    entries, summary = run("cuda", "train_gpt.py", *GPT)
    expected, wanted = run("cpu", "train_gpt.py", *GPT)
    assert column(entries, "loss")[0] == pytest.approx(column(expected, "loss")[0], rel=1e-4)
    assert column(entries, "loss") == pytest.approx(column(expected, "loss"), rel=5e-3)
    assert column(entries, "validation_loss") == pytest.approx(column(expected, "validation_loss"), rel=5e-3)
    assert summary["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=5e-3)
    assert summary["bigram_loss"] == wanted["bigram_loss"]


def test_digits(run, needs):
    """Its dropout draws from the device's own generator, so the losses are alike and not equal."""
    needs("sklearn")
    entries, summary = run("cuda", "train_digits.py", "--epochs", "4")
    expected, wanted = run("cpu", "train_digits.py", "--epochs", "4")
    assert column(entries, "train_loss") == pytest.approx(column(expected, "train_loss"), rel=0.25, abs=0.02)
    assert summary["eval_accuracy"] == pytest.approx(wanted["eval_accuracy"], abs=0.02)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 2e-3), ("bf16", 0.1), ("fp16", 0.05)])
def test_own_loop(run, precision, near):
    entries, summary = run("cuda", "own_loop.py", "--epochs", "8", "--precision", precision)
    expected, wanted = run("cpu", "own_loop.py", "--epochs", "8")
    for name in ("reconstruction_loss", "classification_loss"):
        assert column(entries, name) == pytest.approx(column(expected, name), rel=near, abs=near / 10)
    assert summary["accuracy"] == pytest.approx(wanted["accuracy"], abs=0.02)
    assert summary["explained_variance"] == pytest.approx(wanted["explained_variance"], abs=0.03)
    assert precision == "fp16" or summary["skipped"] == 0
