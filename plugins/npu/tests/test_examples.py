"""The examples, the gallery and the page on transfer_to_npu, on the CPU and on the emulated NPU: the same results.

Dropout is switched off where an example has it: devices have random generators of their own.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "gallery"))
import runs
import twins

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "moving" / "transfer_to_npu.md"
LOSSES = "\nimport json\nprint(json.dumps([float(loss) for loss in losses]))"
SMALL_GPT = ("--context", "32", "--width", "64", "--batch-size", "16", "--log-every", "1", "--checkpoint-every", "50")


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *entries, last = map(json.loads, lines)
    return entries, last["summary"]


def outcome(ended, folder):
    said = "".join(rank.stdout + rank.stderr for rank in ended)
    assert (folder / "metrics.jsonl").exists(), said
    assert "fall back" not in said.lower(), "an operator ran on the CPU behind torch_npu's back"
    return metrics(folder)


@pytest.fixture
def run(fork_ranks, tmp_path):
    """Run an example in forks."""

    def run(device, script, *arguments, nproc=1):
        started = fork_ranks(
            EXAMPLES / script, "--output", tmp_path / device, *arguments, size=nproc, ACCEL_DEVICE=device
        )
        return outcome([rank.finish() for rank in started], tmp_path / device)

    return run


# Alone, it is the training of test_training.py and of the digits below; that takes fifty steps.
@pytest.mark.full
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_gpt_gives_the_cpus_losses(run, nproc):
    steps = 50
    options = ("--steps", steps, *SMALL_GPT)
    (cpu, cpu_end), (npu, npu_end) = (run(device, "train_gpt.py", *options, nproc=nproc) for device in ("cpu", "npu"))
    assert len(cpu) == len(npu) == steps
    for mine, theirs in zip(npu, cpu, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6), f"step {mine['step']}"
    assert npu_end["validation_loss"] == pytest.approx(cpu_end["validation_loss"], rel=1e-4)


@pytest.mark.full  # test_training.py and the loop of one's own train alike, with fewer steps
def test_the_digits_are_read_alike(run):
    (cpu, cpu_end), (npu, npu_end) = (
        run(device, "train_digits.py", "--dropout", "0", "--epochs", "4") for device in ("cpu", "npu")
    )
    for mine, theirs in zip(npu[:2], cpu[:2], strict=True):  # 42 steps
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-6)
    assert npu[-1]["train_loss"] == pytest.approx(cpu[-1]["train_loss"], rel=1e-4)
    assert npu_end["eval_accuracy"] == cpu_end["eval_accuracy"]


def test_a_loop_of_ones_own_ends_alike(run):
    (cpu, cpu_end), (npu, npu_end) = (run(device, "own_loop.py", "--epochs", "3") for device in ("cpu", "npu"))
    assert len(cpu) == len(npu) == 3
    for mine, theirs in zip(npu, cpu, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert npu_end == pytest.approx(cpu_end, rel=1e-4)


# The gallery: scripts beside their twins in plain torch on the CPU.


def assert_alike(found, exact):
    for mine, theirs in zip(found, exact, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-6)


@pytest.mark.parametrize("name", twins.NAMES)
def test_alone_it_gives_the_cpus_losses(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_DEVICE", "npu")
    assert_alike(runs.run("ours", name, tmp_path), runs.run("twins", name, tmp_path))


@pytest.mark.full  # in every run, test_shards.py has statistics over two ranks
def test_batchnorm_over_two_ranks_gives_the_losses_of_the_whole_batch_on_the_cpu(fork_ranks, tmp_path):
    ended = [rank.finish() for rank in fork_ranks(runs.__file__, tmp_path, "synced", ACCEL_DEVICE="npu")]
    assert not any(rank.returncode for rank in ended), "\n".join(rank.stderr for rank in ended)
    found = json.loads((tmp_path / "rank-0.json").read_text())["synced"]
    assert_alike(found, runs.run("twins", "imagenet", tmp_path, "--sync-batchnorm"))


def test_what_a_script_became_gives_the_losses_it_gave_also_on_the_cpu(fork, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    found = []
    for number, (code, device) in enumerate([(before, "npu"), (after, "npu"), (after, "cpu")]):
        script = tmp_path / str(number) / "script.py"
        script.parent.mkdir()
        script.write_text(f"import os\nos.chdir({str(script.parent)!r})\n{code}{LOSSES}")
        done = fork(script, ACCEL_DEVICE=device).finish()
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=5e-6, abs=1e-7)
    assert found[2] == pytest.approx(found[0], rel=5e-6, abs=1e-7)
