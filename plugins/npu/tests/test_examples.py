"""The examples, unchanged, on the CPU and on the emulated NPU: the same losses, the same results.

Dropout is switched off where an example has it: devices have random generators of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL_GPT = ("--context", "32", "--width", "64", "--batch-size", "16", "--log-every", "1", "--checkpoint-every", "50")
LEFT_OUT = ("ACCEL_", "ASCEND_", "LD_LIBRARY_PATH", "TASK_QUEUE_ENABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD")


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *entries, last = map(json.loads, lines)
    return entries, last["summary"]


def run(device, script, folder, *arguments, nproc=1):
    """Run an example as a user would, from an environment that knows nothing of an emulation."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    emulate = ("--emulate", "npu") if device == "npu" else ()
    command = (sys.executable, "-m", "accelcore", "run", *emulate, "--nproc", str(nproc), str(EXAMPLES / script))
    done = subprocess.run(
        [*command, "--output", str(folder), *arguments], capture_output=True, text=True, timeout=300,
        env={**clean, "ACCEL_DEVICE": device, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (folder / "metrics.jsonl").exists(), done.stdout + done.stderr
    assert "fall back" not in done.stderr.lower(), "an operator ran on the CPU behind torch_npu's back"
    if device == "npu":
        assert "EMULATED" in done.stderr
    return metrics(folder)


def on_both(tmp_path, script, *arguments, nproc=1):
    return [run(device, script, tmp_path / device, *arguments, nproc=nproc) for device in ("cpu", "npu")]


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_gpt_gives_the_cpus_losses_for_fifty_steps(tmp_path, nproc):
    (cpu, cpu_end), (npu, npu_end) = on_both(tmp_path, "train_gpt.py", "--steps", "50", *SMALL_GPT, nproc=nproc)
    assert len(cpu) == len(npu) == 50
    for mine, theirs in zip(npu, cpu, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6), f"step {mine['step']}"
    assert npu_end["validation_loss"] == pytest.approx(cpu_end["validation_loss"], rel=1e-4)


def test_the_digits_are_read_alike(tmp_path):
    (cpu, cpu_end), (npu, npu_end) = on_both(tmp_path, "train_digits.py", "--dropout", "0", "--epochs", "4")
    for mine, theirs in zip(npu[:2], cpu[:2], strict=True):  # 42 steps
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6)
    assert npu[-1]["train_loss"] == pytest.approx(cpu[-1]["train_loss"], rel=1e-4)
    assert npu_end["eval_accuracy"] == cpu_end["eval_accuracy"]


def test_a_loop_of_ones_own_ends_alike(tmp_path):
    (cpu, cpu_end), (npu, npu_end) = on_both(tmp_path, "own_loop.py", "--epochs", "8")
    assert len(cpu) == len(npu) == 8
    for mine, theirs in zip(npu, cpu, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert npu_end == pytest.approx(cpu_end, rel=1e-4)
