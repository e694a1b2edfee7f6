"""Goals, findings, and the file that holds them."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.results import DONE, FAILED, MISSED, SCHEMA, Case, Findings, Goal, Results, slug
from benchmarks.paired import Spread, Timing


def record(goals=(), failures=(), rehearsal=False):
    return Findings({}, goals=goals, failures=failures).record(rehearsal=rehearsal)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("a", 1.0, 1.0), True),
        (Goal("a", 1.0, 1.01), False),
        (Goal("a", 6, 6.0, at_least=True), True),
        (Goal("a", 6, 5.9, at_least=True), False),
        (Goal("a", 6, None, at_least=True), False),
        (Goal("a", 6, None), False),
    ],
)
def test_a_goal_is_met_or_not(goal, met):
    assert goal.met is met


def test_a_goal_says_that_it_was_not_measured():
    assert str(Goal("speed", 6, None, at_least=True)) == "speed >= 6, not measured"


def test_status():
    good, bad = Goal("a", 1, 0.5), Goal("b", 1, 2.0)
    assert record([good])["status"] == DONE
    assert record([good, bad])["status"] == MISSED
    assert record([good], ["it broke"])["status"] == FAILED


def test_a_rehearsal_judges_no_goal():
    found = record([Goal("b", 1, 2.0)], rehearsal=True)
    assert (found["status"], found["goals"][0]["met"]) == (DONE, None)


def test_a_case_keeps_its_spread():
    seconds, ratio = Spread.of([1.0, 2.0, 3.0]), Spread.of([0.5, 1.0, 1.5])
    case = Case("bf16", "trainer", Timing(seconds, ratio), samples=3, base="by hand", values={"tokens_per_second": 7})
    (written,) = Findings({}, [case]).record(rehearsal=False)["cases"]
    assert written["timing"]["seconds"] == {
        "median": 2.0, "lower_quartile": 1.5, "upper_quartile": 2.5, "smallest": 1.0, "largest": 3.0,
    }  # fmt: skip
    assert (written["samples"], written["base"], written["values"]) == (3, "by hand", {"tokens_per_second": 7})


def test_results_are_read_back(tmp_path):
    path = tmp_path / "made" / "gpu-x.json"
    first = Results(path)
    first.add("gpt", record())
    first.add("tests", record(failures=["it broke"]))
    held = json.loads(path.read_text())
    assert (held["schema"], held["rehearsal"], list(held["stages"])) == (SCHEMA, False, ["tests", "gpt"])
    again = Results(path)
    assert again.finished("gpt")
    assert not again.finished("tests")
    assert not again.finished("step")
    assert [file.name for file in path.parent.iterdir()] == ["gpu-x.json"]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "gpu-x.json"
    Results(path).add("gpt", record())
    before = path.read_text()
    with pytest.raises(TypeError):
        Results(path).add("step", {**record(), "settings": object()})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 99, "stages": {}}', "no JSON", '{"schema": 1, "stages": []}'])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "gpu-x.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        Results(path)
    assert path.read_text() == text


def test_one_rehearsal_makes_a_file_one(tmp_path):
    results = Results(tmp_path / "gpu-x.json")
    results.add("gpt", record())
    assert not results.rehearsal
    results.add("step", record(rehearsal=True))
    assert results.rehearsal


def test_a_chip_names_a_file():
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("../ (R)") == "r"
    assert slug("/") == "unknown"
