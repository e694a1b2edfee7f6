"""The page of measurements."""

from __future__ import annotations

import pytest

from benchmarks.gpu import draw
from benchmarks.gpu.results import Case, Findings, Goal, Results
from benchmarks.paired import Spread, Timing

TIMING = Timing(Spread(0.25, 0.2, 0.5, 0.1, 1.0), Spread(1.0, 1.0, 1.0, 1.0, 1.0))
VERSIONS = dict.fromkeys(("torch", "cuda", "cudnn", "nccl", "triton", "python", "accelerate"), "1.2.3")
VERSIONS |= {"lightning-fabric": "not installed", "pytorch-lightning": "4.5.6"}
GPT = Findings(
    {"batch": 8, "ceiling_operations_per_second": 6e14},
    [
        Case("bf16", "by hand", TIMING, 9, "by hand", values={"tokens_per_second": 123456.7, "utilisation": 0.523}),
        Case("bf16", "trainer", TIMING, 9, "by hand", values={"tokens_per_second": 123456.7, "utilisation": 0.523}),
        Case("TF32", "trainer", base="by hand", note="not run: a | b"),
    ],
    [Goal("fast", 6, 7.0, at_least=True), Goal("slow", 1.01, 1.5)],
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "page.md").write_text(f"# Page\n\n{draw.BEGIN}\nold\n{draw.END}\n\nmore\n")
    return tmp_path


@pytest.fixture
def run(folder):
    return lambda *arguments: draw.main(["--results", str(folder), "--page", str(folder / "page.md"), *arguments])


def add(folder, findings, *, rehearsal=False, stage="gpt"):
    record = findings.record(rehearsal=rehearsal)
    machine = {"chip": "Some GPU", "driver": "580.1", "versions": VERSIONS}
    Results(folder / "gpu-some-gpu.json").add(stage, {"date": "2026-01-02", "machine": machine, **record})


def test_without_results_it_says_so(folder, run):
    assert run() == 0
    assert (folder / "page.md").read_text() == f"# Page\n\n{draw.BEGIN}\n\n{draw.NOTHING}\n\n{draw.END}\n\nmore\n"
    assert not (folder / draw.PLOT).exists()
    assert run("--check") == 0


def test_a_rehearsal_is_refused(folder, run, capsys):
    add(folder, GPT, rehearsal=True)
    before = (folder / "page.md").read_text()
    assert run() == run("--check") == 2
    assert "rehearsal" in capsys.readouterr().err
    assert (folder / "page.md").read_text() == before
    assert not (folder / draw.PLOT).exists()


def test_one_rehearsed_stage_among_others_is_refused(folder, run):
    add(folder, GPT)
    add(folder, Findings({}), rehearsal=True, stage="step")
    assert run() == 2


def test_results_are_drawn(folder, run):
    add(folder, GPT)
    assert run("--check") == 1
    assert run() == 0
    page = (folder / "page.md").read_text()
    assert page.startswith("# Page\n")
    assert page.endswith("\n\nmore\n")
    assert draw.NOTHING not in page
    assert "| bf16 | trainer | 250 | 200 to 500 | 9 | 1.000 | 123,457 | 52.3% |" in page
    assert "| TF32 | trainer | not run: a \\| b |" in page
    assert "- met: fast >= 6, measured 7" in page
    assert "- **missed**: slow <= 1.01, measured 1.5" in page
    assert "2026-01-02, driver 580.1, torch 1.2.3" in page
    assert "accelerate 1.2.3, pytorch-lightning 4.5.6." in page
    assert "600 TFLOP/s" in page
    plot = (folder / draw.PLOT).read_bytes()
    assert b"<svg" in plot
    assert run("--check") == 0
    assert run() == 0
    assert (folder / draw.PLOT).read_bytes() == plot, "the same results, the same file"


def test_a_failure_is_shown(folder, run):
    add(folder, Findings({"passed": 3, "failed": 1, "skipped": 0}, failures=["a::b: broke"]), stage="tests")
    assert run() == 0
    page = (folder / "page.md").read_text()
    assert "3 passed, 1 failed, 0 skipped." in page
    assert "- **failed**: a::b: broke" in page


def test_a_page_without_markers_is_refused(folder, run):
    (folder / "page.md").write_text("# Page\n")
    assert run() == 2
    assert (folder / "page.md").read_text() == "# Page\n"


def test_the_page_in_the_tree_is_what_its_results_say():
    assert draw.main(["--check"]) == 0


def test_met_goals_that_differ_in_their_subject_share_a_line(folder, run):
    share = [Goal(f"{name}: share", 0.8, measured, at_least=True) for name, measured in (("a", 0.9), ("b", 0.7))]
    add(folder, Findings({}, goals=[*share, Goal("c: share", 0.8, 0.85, at_least=True)]))
    assert run() == 0
    text = (folder / "page.md").read_text()
    assert "- **missed**: b: share >= 0.8, measured 0.7\n- met by 2 cases: share >= 0.8, measured 0.85 to 0.9\n" in text
