"""The examples, made short: each once as a user runs it, and otherwise in forks, which start at once."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
ALL = [*SCRIPTS, *(f"gallery/{path.name}" for path in EXAMPLES.glob("gallery/*.py"))]
SMALL_GPT = ["--context", "32", "--width", "64", "--layers", "1", "--batch-size", "8", "--accumulate", "2"]
# One thread each: the workers of a parallel test run would otherwise fight for the cores.
VARIABLES = {"ACCEL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def as_a_user(script, *arguments):
    """The command for a Python of its own."""
    return [sys.executable, str(EXAMPLES / script), *map(str, arguments)]


@pytest.fixture
def run(fork):
    def run(script, *arguments, code=0, **variables):
        done = fork(EXAMPLES / script, *arguments, **VARIABLES | variables).finish()
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def metrics(folder):
    """The logged entries without what depends on the clock, and the summary."""
    *entries, last = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    for entry in entries:
        entry.pop("tokens_per_second", None)
    last["summary"].pop("seconds", None)
    return entries, last["summary"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_names_no_device(script):
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert not re.search(r"(?<![a-z])(cpu|cuda|npu|gpu|nccl|hccl|gloo|mps|xpu)(?![a-z])", text, re.IGNORECASE)


@pytest.mark.parametrize("script", ALL)
def test_a_file_as_output_is_a_wrong_option(script, run, tmp_path):
    (tmp_path / "file").touch()
    assert run(script, "--output", tmp_path / "file", code=2).stderr.endswith("file is a file, not a folder\n")


@pytest.mark.parametrize("script", ALL)
def test_impossible_device_is_a_message_and_exit_code_1(script, run, tmp_path):
    done = run(script, "--output", tmp_path / "out", code=1, ACCEL_DEVICE="nosuchdevice")
    assert done.stderr.startswith("ACCEL_DEVICE='nosuchdevice'")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("script", "package"), [("train_gpt.py", "rich"), ("train_digits.py", "sklearn")])
def test_missing_package_is_one_line_that_says_what_to_install(script, package, run, tmp_path):
    (tmp_path / f"{package}.py").touch()  # found before the real package, and without what that one has
    done = run(shutil.copy(EXAMPLES / script, tmp_path), code=1)
    assert done.stderr.count("\n") == 1
    assert package in done.stderr
    assert 'pip install ".[examples]" in a clone' in done.stderr


def test_gpt_learns_and_a_killed_run_resumes_exactly(run, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [*SMALL_GPT, "--steps", 24, "--log-every", 4, "--checkpoint-every", 12]
    done = run("train_gpt.py", *arguments, "--output", whole)

    entries, summary = metrics(whole)
    assert [entry["step"] for entry in entries] == list(range(4, 25, 4))
    assert entries[-1]["loss"] < entries[0]["loss"] - 1
    assert summary["validation_loss"] < entries[2]["validation_loss"] < math.log(256)
    assert summary["validation_bits"] == pytest.approx(summary["validation_loss"] / math.log(2))
    assert summary["sample"].startswith("def ")
    *_, baseline, verdict = done.stdout.splitlines()
    assert f"bigram baseline  {summary['bigram_loss']:.3f} nats/byte" in baseline
    assert verdict == "After 24 steps the model is no better than the bigram baseline: train longer, with --steps."
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-00000012", "step-00000024"]

    # What a process leaves that is killed between two checkpoints: the older one, and metrics beyond it, torn off.
    shutil.copytree(whole / "checkpoints/step-00000012", killed / "checkpoints/step-00000012")
    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (killed / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:9], encoding="utf-8")
    done = run("train_gpt.py", *arguments, "--output", killed, "--resume")
    assert re.findall(r"^step (\d+)/", done.stdout, re.MULTILINE) == ["16", "20", "24"]
    assert metrics(killed) == (entries, summary)


@pytest.mark.full
def test_gpt_as_it_comes_beats_the_bigram_model(tmp_path):
    command = as_a_user("train_gpt.py", "--output", tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=os.environ | VARIABLES)
    assert done.returncode == 0, done.stdout + done.stderr
    _, summary = metrics(tmp_path)
    assert summary["validation_loss"] < summary["bigram_loss"]


@pytest.mark.full  # a killed run resumes in each run of the tests
def test_gpt_saves_on_interrupt_and_starts_afresh_unless_resumed(run, tmp_path):
    arguments = [*SMALL_GPT, "--log-every", 2, "--output", tmp_path]
    process = subprocess.Popen(
        as_a_user("train_gpt.py", *arguments, "--steps", 1000000),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | VARIABLES, bufsize=1,
    )  # fmt: skip
    with process:
        try:
            assert any(line.startswith("step ") for line in process.stdout)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    saved = int(re.search(r"^interrupted at step (\d+); --resume continues from there$", errors, re.MULTILINE)[1])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{saved:08d}"]

    run("train_gpt.py", *arguments, "--steps", saved + 3, "--resume")
    entries, summary = metrics(tmp_path)
    assert [entry["step"] for entry in entries] == [*range(2, saved + 1, 2), saved + 2, saved + 3]
    assert summary["steps"] == saved + 3

    run("train_gpt.py", *arguments, "--steps", 2)
    assert [entry["step"] for entry in metrics(tmp_path)[0]] == [2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.fixture(scope="module")
def train_gpt():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpt_sees_no_byte_before_its_time(train_gpt):
    model = train_gpt.GPT(context=8, width=32, layers=2)
    text = torch.arange(8).view(1, 8)
    changed = text.clone()
    changed[0, 5] = 200
    difference = (model(text) - model(changed)).abs().amax(dim=2)[0]
    assert (difference[:5] < 1e-5).all()
    assert (difference[5:] > 1e-4).all()


def test_gpt_bigram_baseline_is_that_of_smoothed_counts(train_gpt):
    text = torch.tensor(list(b"abababab"), dtype=torch.uint8)  # b follows a 4 times, a follows b 3 times
    windows = torch.tensor([list(b"abz"), list(b"zzz")], dtype=torch.uint8)
    b_after_a, z_after_b, z_after_z = 4.5 / (4 + 128), 0.5 / (3 + 128), 1 / 256
    expected = -(math.log(b_after_a) + math.log(z_after_b) + 2 * math.log(z_after_z)) / 4
    assert train_gpt.bigram_loss(text, windows, smoothing=0.5) == pytest.approx(expected)


def test_digits_are_read(run, tmp_path):
    done = run("train_digits.py", "--epochs", 6, "--output", tmp_path)
    entries, summary = metrics(tmp_path)
    assert summary["eval_accuracy"] >= 0.98
    assert done.stdout.splitlines()[-1] == f"accuracy on held-out images: {summary['eval_accuracy']:.4f}"
    assert entries[-1]["train_loss"] < entries[0]["train_loss"] / 10
    assert entries[-1]["eval_accuracy"] == summary["eval_accuracy"]


@pytest.mark.full  # in every run: two ranks, below, and a whole training in test_third_party.py
@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16"])
def test_own_loop_in_each_precision(precision, run, tmp_path):
    done = run("own_loop.py", "--precision", precision, "--output", tmp_path)
    _, summary = metrics(tmp_path)
    assert summary["accuracy"] >= 0.9
    assert summary["explained_variance"] > 0.8
    assert done.stdout.splitlines()[-1] == f"accuracy on held-out pictures: {summary['accuracy']:.4f}"


def test_own_loop_on_two_ranks_is_the_same_training(run, fork_ranks, tmp_path):
    short = ["--epochs", 1, "--output"]
    run("own_loop.py", *short, tmp_path / "one")
    ended = [rank.finish() for rank in fork_ranks(EXAMPLES / "own_loop.py", *short, tmp_path / "two", **VARIABLES)]
    assert [rank.returncode for rank in ended] == [0, 0], "".join(rank.stdout + rank.stderr for rank in ended)
    assert ended[0].stdout.splitlines()[-1] == "It is below the goal of 0.9: train longer, with --epochs."
    (one,), _ = metrics(tmp_path / "one")
    (two,), _ = metrics(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-4)


def test_fsdp_divides_the_model_and_one_rank_resumes_what_two_saved(run, fork_ranks, tmp_path):
    small = ["--text", 60_000, "--width", 32, "--output", tmp_path]
    ended = [rank.finish() for rank in fork_ranks(EXAMPLES / "train_fsdp.py", *small, "--epochs", 1, **VARIABLES)]
    assert [rank.returncode for rank in ended] == [0, 0], "".join(rank.stdout + rank.stderr for rank in ended)
    assert "rank 0 of 2 holds 50% of them" in ended[0].stdout
    assert "each rank saved its part" in ended[0].stdout
    assert "Warning" not in ended[0].stderr
    done = run("train_fsdp.py", *small, "--epochs", 2, "--resume")
    assert "rank 0 of 1 holds 100% of them" in done.stdout
    assert "each rank" not in done.stdout
    first, second = (re.findall(r"held-out loss (\S+) nats", text) for text in (ended[0].stdout, done.stdout))
    assert len(first) == len(second) == 1
    assert float(second[0]) < float(first[0]) - 0.1 < math.log(256)


def test_a_fine_tuned_model_resumes_after_its_body_was_unfrozen(run, tmp_path):
    short, whole, stopped = ["--pretraining", 4, "--unfreeze", 2, "--epochs"], tmp_path / "whole", tmp_path / "stopped"
    undisturbed = run("finetune.py", *short, 4, "--output", whole).stdout.splitlines()
    assert float(undisturbed[-1].split()[-1]) > 0.7  # chance: 0.125

    (weights,) = (whole / "pretrained").glob("step-*/model.safetensors")
    torch.save(load_file(weights), stopped.with_suffix(".pth"))
    given = [*short, 3, "--output", stopped, "--weights", stopped.with_suffix(".pth")]
    assert run("finetune.py", *given).stdout.splitlines()[2].split(": ")[1] == undisturbed[2].split(": ")[1]
    resumed = run("finetune.py", *given, "--epochs", 4)
    assert resumed.stdout.splitlines() == undisturbed[3:]
    assert not (stopped / "pretrained").exists()

    body = "body.0.weight"
    last = [max((folder / "finetuned").glob("step-*")) / "model.safetensors" for folder in (whole, stopped)]
    assert torch.equal(load_file(last[0])[body], load_file(last[1])[body])
    assert not torch.equal(load_file(last[0])[body], load_file(weights)[body])


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_weights_that_are_damaged_are_one_line(run, tmp_path, ending):
    damaged = tmp_path / f"damaged.{ending}"
    damaged.write_bytes(b"\x9c" * 64)
    error = run("finetune.py", "--output", tmp_path, "--weights", damaged, code=1).stderr
    assert f"damaged.{ending} cannot be read" in error.splitlines()[-1]
    assert "Traceback" not in error
