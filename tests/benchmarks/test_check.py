"""What scripts/gpu_check.py runs, keeps and says; the stages are stand-ins."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import check
from benchmarks.gpu.results import STAGES, Findings, Goal

MISSED = Findings({}, goals=[Goal("speed", 1.01, 1.5), Goal("memory", 1, 0.5)])
BROKEN = Findings({}, failures=["it broke", "and this too"])


@pytest.fixture
def stages(monkeypatch):
    """What each stage finds, and which were run."""

    class Stages(dict):
        rehearsal = False

        def __init__(self):
            self.ran = []

    class Child:
        def __init__(self, folder, options):
            pass

        def run(self, what, seconds):
            if what == "describe":
                return {"chip": "Some GPU", "rehearsal": found.rehearsal}
            found.ran.append(what)
            outcome = found.get(what, Findings({}))
            if isinstance(outcome, Exception):
                raise outcome
            return outcome.record(rehearsal=found.rehearsal)

    found = Stages()
    monkeypatch.setattr(check, "Child", Child)
    return found


@pytest.fixture
def run(tmp_path, capsys):
    """Run the check; its exit status and its last lines."""

    def run(*arguments):
        status = check.main(["--output", str(tmp_path), "--device", "cpu", *arguments])
        return status, capsys.readouterr().out.rpartition("results: ")[2].splitlines()[1:]

    return run


def test_everything_once(stages, run, tmp_path):
    assert run("--stage", "all") == (0, [f"done: {', '.join(STAGES)}; every goal met"])
    assert stages.ran == list(STAGES)
    assert list(json.loads((tmp_path / "gpu-some-gpu.json").read_text())["stages"]) == list(STAGES)


def test_what_is_there_is_not_run_again(stages, run):
    run("--stage", "step")
    assert run("--stage", "all")[0] == 0
    assert stages.ran == ["step", *(stage for stage in STAGES if stage != "step")]


def test_again(stages, run):
    run("--stage", "step")
    run("--stage", "step", "--again")
    assert stages.ran == ["step", "step"]


def test_a_missed_goal_is_named_now_and_later(stages, run):
    stages["gpt"] = MISSED
    expected = (1, ["goal missed: speed <= 1.01, measured 1.5"])
    assert run("--stage", "gpt") == expected
    assert run("--stage", "gpt") == expected
    assert stages.ran == ["gpt"]


def test_a_failed_stage_is_named_and_run_again_after_the_others(stages, run):
    stages["tests"] = BROKEN
    expected = (1, ["tests failed: it broke", "tests failed: and this too"])
    assert run("--stage", "tests") == expected
    assert run("--stage", "all") == expected
    assert stages.ran == ["tests", *(stage for stage in STAGES if stage != "tests"), "tests"]
    del stages["tests"]
    assert run("--stage", "all")[0] == 0


def test_a_stage_that_ends_without_a_result_has_failed(stages, run):
    stages["resnet"] = check.ChildError("it ended with status -11")
    assert run("--stage", "all") == (1, ["resnet failed: it ended with status -11"])
    assert stages.ran == list(STAGES)


def test_without_time_a_stage_is_left_for_the_next_run(stages, run):
    status, lines = run("--stage", "all", "--limit", "220")
    assert (status, lines) == (
        3,
        ["not run for lack of time, run again: tests, gpt, batches, optimizers, resnet, start, precision"],
    )
    assert stages.ran == [stage for stage in STAGES if check.NEEDED[stage] < 220 - check.GRACE]
    assert run("--stage", "all")[0] == 0


def test_a_rehearsal_has_a_file_of_its_own_and_judges_nothing(stages, run, tmp_path):
    stages.rehearsal = True
    stages["gpt"] = MISSED
    assert run("--stage", "gpt") == (0, ["done: gpt"])
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-some-gpu-rehearsal.json"]


def test_a_file_of_another_kind_is_impossible(stages, run, tmp_path):
    (tmp_path / "gpu-some-gpu.json").write_text("{}")
    assert run("--stage", "gpt")[0] == 2
    assert not stages.ran


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "soon"])
def test_a_limit_is_a_time(run, limit):
    with pytest.raises(SystemExit) as caught:
        run("--stage", "gpt", "--limit", limit)
    assert caught.value.code == 2
