"""The benchmark of optimizers: what it compares, what it says of it, and the page that is drawn from it."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import optimizers as benchmark
from benchmarks.draw_optimizers import SECTION
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.optimizers import FLAT, FLOOR, NINE, OWN, TORCH
from benchmarks.report import write_results

SMALL = {"big": [(32, 16)] * 10, "many": [(8, 4), (3,)] * 10}


@pytest.fixture(scope="module")
def tables():
    """The tables of a quick run over tensors that take no time."""
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    patch.setattr(benchmark, "SIZES", SMALL)
    patch.setattr(benchmark, "SECONDS", 0.0)
    yield list(benchmark.run(quick=True))
    patch.undo()
    torch.set_num_threads(threads)


@pytest.fixture
def results(tables, tmp_path):
    """A file of results, as of a full run."""
    path = tmp_path / "optimizers.json"
    versions = describe_versions(benchmark.DISTRIBUTIONS)
    write_results(
        path, benchmark="optimizers", quick=False, machine=describe_machine(), versions=versions, tables=tables
    )
    return path


def rows(table, *, timed):
    return {row.case: row for row in table.rows if (row.timing is not None) is timed}


def test_every_optimizer_has_a_table_for_each_size(tables):
    found = [(table.settings["optimizer"], table.settings["size"]) for table in tables]
    assert found == [(name, size) for size in SMALL for name in NINE]
    assert {table.settings["threads"] for table in tables} == {1}
    assert {table.settings["elements"] for table in tables} == {512, 35}


def test_what_is_not_timed_says_why(tables):
    for table in tables:
        assert all(row.note for row in rows(table, timed=False).values())
        assert FLOOR in rows(table, timed=True)


def test_the_floor_moves_the_bytes_of_an_update(tables):
    """What is said of the memory's speed has to follow from them and the time."""
    for table in tables:
        floor, moved = rows(table, timed=True)[FLOOR], table.settings["bytes a parameter"]
        said = float(floor.note.partition(" at ")[2].removesuffix(" GB/s"))
        assert moved == NINE[table.settings["optimizer"]].again or table.settings["size"] == "many"
        assert abs(12 * table.settings["elements added by the floor"] - moved * table.settings["elements"]) < 12
        speed = moved * table.settings["elements"] / floor.timing.seconds.median / 1e9
        assert said == pytest.approx(speed, abs=0.06)
        assert floor.timing.ratio.median == 1


def test_torchs_classes_and_routes_are_there_where_torch_has_them(tables):
    for table in tables:
        name, timed = table.settings["optimizer"], rows(table, timed=True)
        assert ("torch for-loop" in timed) == ("torch foreach" in timed) == (NINE[name].torch is not None)
        assert ("torch fused" in timed) == (name in ("adam", "adamw", "sgd"))


def test_our_route_is_named_and_profiled(accel, tables):
    known = set(accel.optimizers.names())
    for table in tables:
        name, timed = table.settings["optimizer"], rows(table, timed=True)
        assert (OWN in timed) == (name in known)
        for case in {OWN, FLAT} & timed.keys():
            said = table.settings["routes"][case]
            routes = {choice.route for choice in accel.optimizers.explain(name)}
            assert said["route"] in routes == said["explained"].keys()
            assert 0 < sum(kernel["share"] for kernel in said["kernels"]) <= 1
            assert said["route"] in timed[case].note
            kernel = {"fused": f"_fused_{name}_", "native": f"accelcore::{name}"}.get(said["route"], "")
            assert any(kernel in seen["name"] for seen in said["kernels"])


def test_goals_are_ratios_of_what_was_timed(tables):
    for table in tables:
        timed, kind = rows(table, timed=True), NINE[table.settings["optimizer"]]
        floors = [goal for goal in table.goals if goal.what.endswith(FLOOR)]
        ours = {OWN, FLAT} & timed.keys()
        assert [goal.limit for goal in floors] == [kind.limits[table.settings["size"]]] * len(ours)
        for goal in floors:
            case = goal.what.split(": ")[1].partition(" / ")[0]
            assert goal.measured == timed[case].timing.ratio.median


def test_routes_that_do_not_agree_are_no_comparison(monkeypatch):
    """A case that trains otherwise than the first must not be timed."""
    monkeypatch.setitem(NINE, "sgd", benchmark.Kind({"lr": 0.1, "momentum": 0.9}, 20, 20, _Wrong))
    cases = benchmark._Cases("sgd", [(4, 3)])
    with pytest.raises(AssertionError, match="does not train as"):
        cases.check()


class _Wrong(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        super().step()


# The page.


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "page.md").write_text(f"# Page\n\n{SECTION.begin}\nold\n{SECTION.end}\n\nmore\n")
    return tmp_path


@pytest.fixture
def draw(folder):
    paths = ["--results", str(folder / "optimizers.json"), "--page", str(folder / "page.md")]
    return lambda *arguments: SECTION.main([*paths, *arguments])


def test_without_results_it_says_so(folder, draw):
    assert draw() == draw("--check") == 0
    expected = f"# Page\n\n{SECTION.begin}\n\n{SECTION.nothing}\n\n{SECTION.end}\n\nmore\n"
    assert (folder / "page.md").read_text() == expected


def test_results_are_drawn(folder, draw, results, tables):
    assert draw("--check") == 1
    assert draw() == draw("--check") == 0
    text, plot = (folder / "page.md").read_text(), (folder / SECTION.plot).read_bytes()
    assert text.startswith("# Page\n")
    assert text.endswith("\n\nmore\n")
    assert "### 0.0 million parameters in 1 tensor, 1 thread" in text
    first = rows(tables[0], timed=True)
    elements = tables[0].settings["elements"]
    for case in (OWN, *list(TORCH)[:2]):
        nanoseconds = first[case].timing.seconds.median / elements * 1e9
        assert f"{nanoseconds:.3f} ({first[case].timing.ratio.median:.2f})" in text
    assert f"{sum(goal.met for table in tables[:9] for goal in table.goals)} of " in text
    assert b"<svg" in plot
    assert draw() == 0
    assert (folder / SECTION.plot).read_bytes() == plot, "the same results, the same file"


@pytest.mark.parametrize("change", [{"quick": True}, {"benchmark": "flat"}, {"quick": None, "benchmark": None}])
def test_other_results_are_refused(folder, draw, results, change, capsys):
    kept = {key: value for key, value in {**json.loads(results.read_text()), **change}.items() if value is not None}
    results.write_text(json.dumps(kept))
    before = (folder / "page.md").read_text()
    assert draw() == draw("--check") == 2
    assert str(results) in capsys.readouterr().err
    assert (folder / "page.md").read_text() == before


def test_a_page_without_markers_is_refused(folder, draw):
    (folder / "page.md").write_text("# Page\n")
    assert draw() == 2
    assert (folder / "page.md").read_text() == "# Page\n"


def test_the_page_in_the_tree_is_what_its_results_say():
    assert SECTION.main(["--check"]) == 0
