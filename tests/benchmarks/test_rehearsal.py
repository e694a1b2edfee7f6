"""Every stage of scripts/gpu_check.py, run for real at toy size on the CPU; one of them by the program itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import distributions, entry_points
from itertools import product
from math import log
from pathlib import Path

import pytest

from accelcore.torch_features import BACKWARD_PASS_AUTOCAST
from benchmarks.gpu.check import Child, ChildError, main
from benchmarks.gpu.stage_profile import busy
from benchmarks.gpu.stage_tests import read_report
from benchmarks.gpu.tree import make_importable

ROOT = Path(__file__).parents[2]
OURS = ("by hand", "trainer")
TOY = ("--toy", "--device", "cpu")
VERSIONS = {"python", "torch", "cuda", "cudnn", "nccl", "triton", "accelcore"}


def check(output, *arguments):
    command = [sys.executable, ROOT / "scripts/gpu_check.py", "--output", output, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.fixture
def rehearse(fork, tmp_path):
    """Run a stage, which must say where and when it ran and that it means nothing; its record."""

    def rehearse(stage, seconds=120):
        done = fork("-m", "benchmarks.gpu", stage, *TOY, "--result", tmp_path / "result.json").finish(seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return rehearsed(json.loads((tmp_path / "result.json").read_text(encoding="utf-8")))

    return rehearse


def rehearsed(record):
    assert (record["status"], record["device"]) == ("done", "cpu"), record["failures"]
    assert record["rehearsal"]
    assert record["toy"]
    assert record["date"].endswith("+00:00")
    assert record["machine"]["chip"]
    assert record["machine"]["versions"].keys() >= VERSIONS
    assert all(goal["met"] is None for goal in record["goals"])
    return record


def timed(cases):
    """The cases that were timed, each with its spread; all others must say why they were not run."""
    found = [case for case in cases if case["timing"]]
    assert all(case["note"].startswith("not run: ") for case in cases if case not in found)
    for case in found:
        seconds = case["timing"]["seconds"]
        assert 0 < seconds["smallest"] <= seconds["lower_quartile"] <= seconds["median"]
        assert seconds["median"] <= seconds["upper_quartile"] <= seconds["largest"]
        assert case["samples"] >= 2
    return found


@pytest.mark.full  # how its report is read is below
def test_without_a_gpu_its_tests_are_skipped(rehearse):
    counts = rehearse("tests")["settings"]
    assert (counts["passed"], counts["failed"]) == (0, 0)
    assert counts["skipped"] > 0


@pytest.mark.full
def test_every_experiment_answers(rehearse):
    found = rehearse("experiments", seconds=400)["settings"]["experiments"]
    assert list(found) == [f"E{number}" for number in range(1, 13)]
    weights = found["E9"]["answer"]
    assert weights.pop("status") == [0, 0]
    assert len(weights) == 3
    assert max(weights.values()) < 1e-5


def test_the_trainer_steps_as_the_loop_by_hand(rehearse):
    found = timed(rehearse("step")["cases"])
    names = {case["name"] for case in found}
    assert names >= {"by hand", "by hand, again", "trainer"}
    assert not names & {"by hand, graph", "trainer, graph"}, "the CPU has no graphs"
    differences = [case["values"]["largest_weight_difference"] for case in found if case["name"] == "trainer"]
    assert differences == [0, 0]


@pytest.mark.skipif(not BACKWARD_PASS_AUTOCAST.present, reason=f"torch has no {BACKWARD_PASS_AUTOCAST}")
def test_speed_and_utilisation_follow_from_time(rehearse):
    record = rehearse("gpt")
    found, settings = timed(record["cases"]), record["settings"]
    modes = ("fp32 ieee", "bf16", "bf16 + compile")  # the CPU declares no TF32
    assert {(case["table"], case["name"]) for case in found if case["name"] in OURS} == set(product(modes, OURS))
    for case in found:
        speed = settings["tokens a step"] / case["timing"]["seconds"]["median"]
        used = speed * settings["operations a token"] / settings["ceiling_operations_per_second"]
        assert case["values"] == pytest.approx({"tokens_per_second": speed, "utilisation": used})


@pytest.mark.full  # the stage gpt derives its figures alike
def test_images_follow_from_time(rehearse):
    found = timed(rehearse("resnet")["cases"])
    modes = ("bf16", "fp16", "bf16 + compile", "fp16 + compile")
    assert {(case["table"], case["name"]) for case in found if case["name"] in OURS} == set(product(modes, OURS))
    for case in found:
        assert case["values"]["images_per_second"] == pytest.approx(4 / case["timing"]["seconds"]["median"])


@pytest.mark.full  # its models and modes are those of the stages gpt and resnet
def test_every_precision_learns_the_same(rehearse):
    found = timed(rehearse("precision")["cases"])
    modes = {"fp32 ieee", "fp16", "bf16", "fp32 ieee + compile", "fp16 + compile", "bf16 + compile"}
    for model, chance in (("GPT", log(32)), ("ResNet", log(4))):
        losses = {case["name"]: case["values"]["loss"] for case in found if case["table"] == model}
        assert losses.keys() == modes
        assert max(losses.values()) - min(losses.values()) < 0.05
        assert max(losses.values()) < 0.95 * chance


def test_the_optimizers_are_compared_with_float64_and_with_a_copy(rehearse):
    record = rehearse("optimizers")
    found, differences = timed(record["cases"]), record["settings"]["differences"]
    assert len(differences) == 9
    assert max(differences.values()) < 1e-5
    tables, copies = ("21M in 10 tensors", "7M in 1000 tensors", "GPT-2 124M's parameters"), ("copy", "copy, again")
    assert {(case["table"], case["name"]) for case in found} == set(product(tables, (*copies, *differences)))
    assert len(record["goals"]) == 9 + 3 * 9
    for case in found:
        assert case["note"].startswith("route ") is (case["name"] not in copies)
        assert ("share_of_copy" in case["values"]) is (case["name"] not in copies)
        assert all(value > 0 for value in case["values"].values())


@pytest.mark.full  # the stages below are processes too; tests/training/saving resumes to the bit
def test_a_resume_and_a_repetition_give_the_same_bits(tmp_path):
    """By the program itself."""
    done = check(tmp_path, "--stage", "checkpoint", *TOY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSAL: the numbers below mean nothing" in done.stdout
    assert done.stdout.endswith("a REHEARSAL: no goal was judged\ndone: checkpoint\n")
    (path,) = tmp_path.glob("gpu-*-rehearsal.json")
    held = json.loads(path.read_text(encoding="utf-8"))
    assert held["rehearsal"]
    assert held["stages"].keys() == {"checkpoint"}
    record = rehearsed(held["stages"]["checkpoint"])
    assert len(timed(record["cases"])) == 6
    assert [goal["measured"] for goal in record["goals"]] == [0, 0]


@pytest.mark.full  # the stage step has the same cases
def test_launches_are_counted_for_both(rehearse):
    for case in rehearse("profile")["cases"]:
        assert case["name"] in (*OURS, "by hand, again")
        assert 0 < case["values"]["host_microseconds_a_step"] <= case["values"]["microseconds_a_step"]


@pytest.mark.full
@pytest.mark.parametrize(("stage", "count"), [("batches", 12), ("options", 11), ("start", 13), ("feed", 5)])
def test_the_other_stages_come_to_their_end(rehearse, stage, count):
    found = rehearse(stage)["cases"]
    assert len([case for case in found if case["timing"] or case["values"]]) == count


def test_overlapping_kernels_are_busy_once():
    assert busy([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == 4.0


def test_no_gpu_is_no_rehearsal(fork, tmp_path, monkeypatch, capsys):
    """The program asks its first process; here that is a fork."""

    def run(child, what, seconds):
        result = tmp_path / "result.json"
        arguments = ("--device", "cuda", "--seconds", seconds, "--result", result)
        done = fork("-m", "benchmarks.gpu", what, *arguments, CUDA_VISIBLE_DEVICES="").finish()
        assert not result.exists()
        raise ChildError(f"{done.returncode}, {done.stderr}")

    monkeypatch.setattr(Child, "run", run)
    assert main(["--stage", "step", "--output", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("cannot use cuda: 1, ")
    assert "cuda' cannot be used here" in said
    assert not list(tmp_path.iterdir())


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path, monkeypatch):
    marker, options = tmp_path / "pid", type("Options", (), {"device": "cpu", "toy": True})
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "__init__.py").touch()  # or another on the path is found in its place
    (tmp_path / "benchmarks" / "gpu" / "__main__.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    monkeypatch.setattr("benchmarks.gpu.check.GRACE", 2.0)
    with pytest.raises(ChildError, match="ended after"):
        Child(tmp_path, options).run("step", 1.0)
    assert _gone(int(marker.read_text()))


def test_the_tree_stands_in_for_an_installation(tmp_path, nothing_installed):
    pytest.importorskip("tomllib")  # of Python 3.11
    assert make_importable(tmp_path, backend="cuda") == "this tree"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == [
        "accelcore", "accelcore_cpu", "accelcore_cuda", "benchmarks",
    ]  # fmt: skip
    found = {dist.name: dist for dist in distributions(path=[str(tmp_path)])}
    assert found.keys() == {"accelcore", "accelcore-cpu", "accelcore-cuda"}
    points = {(point.group, point.name, point.value) for dist in found.values() for point in dist.entry_points}
    assert {("accelcore.backends", name, f"accelcore_{name}") for name in ("cpu", "cuda")} <= points


def test_an_installation_is_used_where_there_is_one(tmp_path):
    assert "cpu" in entry_points(group="accelcore.backends").names
    assert make_importable(tmp_path, backend="cpu") == "installed"
    assert [path.name for path in tmp_path.iterdir()] == ["benchmarks"]


def test_a_report_of_tests_is_counted(tmp_path):
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="left"><skipped message="no GPU"/></testcase>'
        '<testcase classname="a" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase classname="a" name="worse"><error/></testcase></testsuite></testsuites>'
    )
    counts, failures = read_report(tmp_path / "report.xml")
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert failures == ["a::bad: assert 1 == 2", "a::worse: error"]


def _gone(pid):
    for _ in range(100):  # a killed process stays until its new parent has noticed
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
