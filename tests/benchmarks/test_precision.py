"""The benchmark of precision: what it compares, what it says of it, and the page that is drawn from it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import convergence, precision, precision_models
from benchmarks.draw_precision import SECTION
from benchmarks.gpu.gpt import Shape
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.report import write_results
from benchmarks.torch_alone import TorchAlone

TINY = Shape(layers=1, heads=2, width=16, context=8, vocabulary=256)
NAMES = list(precision.TASKS)
# Made by a process of its own, too, which has to be able to import it.
TASKS = {NAMES[0]: lambda: precision_models.gpt(2, TINY), NAMES[1]: lambda: precision_models.resnet(2, 8)}


class HereAlone(TorchAlone):
    """Its cases run here: a process of its own takes long to start, and is tested with `full`."""

    def __init__(self, make, *arguments):
        self.cases = make(*arguments)

    def __exit__(self, *error):
        pass

    @staticmethod
    def clock():
        return precision.process_time()


@pytest.fixture(scope="module")
def tables():
    """The tables of a quick run over what takes no time."""
    patch, threads = pytest.MonkeyPatch(), torch.get_num_threads()
    for module in (precision, precision_models):
        patch.setattr(module, "TASKS", TASKS)
    patch.setattr(precision, "TorchAlone", HereAlone)
    patch.setattr(precision, "SIZE", 32)
    patch.setattr(precision, "TENSORS", 12)
    patch.setattr(convergence, "SMALL", TINY)
    patch.setattr(convergence, "EPOCHS", 1)
    patch.setattr(convergence, "BATCH", 650)
    patch.setattr(convergence, "PRESETS", {name: convergence.PRESETS[name] for name in ("fp32", "fp16")})
    patch.setattr("benchmarks.paired.gc.collect", int)  # slow in a large process, and no time is judged here
    yield {table.title: table for table in precision.run(quick=True)}
    patch.undo()
    torch.set_num_threads(threads)


@pytest.mark.full  # as all that asks for its tables; those of the optimizers are made in every run
def test_every_precision_is_a_case_beside_the_loops_by_hand(tables):
    for task in NAMES:
        (table,) = [table for title, table in tables.items() if title.startswith(task)]
        cases = {row.case for row in table.rows}
        assert cases == {*precision.TRAINERS, precision_models.HAND_FP32, precision_models.HAND_BF16}
        assert all(row.timing is not None for row in table.rows)


@pytest.mark.full
def test_goals_are_ratios_of_what_was_timed(tables):
    for title, table in tables.items():
        ratios = {row.case: row.timing.ratio.median for row in table.rows if row.timing is not None}
        for goal in table.goals:
            case, _, base = goal.what.partition(": ")[2].partition(" / ")
            if base == precision.EXACT:
                assert goal.measured == ratios[case], title
    shares = [goal for goal in tables[f"{NAMES[0]}: one step"].goals if "to that of a product" in goal.what]
    assert {goal.limit for goal in shares} == {1 / 0.7, 1 / 0.75}


@pytest.mark.full
def test_what_is_learned_is_shown_for_each_seed(tables):
    learned = [table for table in tables.values() if table.goals and table.rows[0].timing is None]
    assert len(learned) == 2
    for table in learned:
        assert [row.case for row in table.rows] == list(convergence.PRESETS)
        base, *others = table.rows
        seeds = [value for name, value in base.counts.items() if name != "mean"]
        assert len(seeds) == table.settings["seeds"] == 2
        assert len(table.goals) == len(others)


def _cases(number):
    return {"adds": lambda: number + 1, "fails": lambda: 1 / 0}


@pytest.mark.full
def test_torch_alone_is_a_process_that_is_timed_and_may_fail():
    with TorchAlone(_cases, 3) as alone:
        before = alone.clock()
        alone.cases["adds"]()
        assert alone.clock() > before
        with pytest.raises(EOFError):
            alone.cases["fails"]()


@pytest.fixture
def draw(tables, tmp_path):
    path = tmp_path / "precision.json"
    versions = describe_versions(precision.DISTRIBUTIONS)
    write_results(
        path, benchmark="precision", quick=False, machine=describe_machine(), versions=versions,
        tables=list(tables.values()),
    )  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{SECTION.begin}\nold\n{SECTION.end}\n\nmore\n")
    return lambda *arguments: (SECTION.main(["--results", str(path), "--page", str(page), *arguments]), page)


@pytest.mark.full
def test_results_are_drawn(draw, tables):
    assert draw("--check")[0] == 1
    _, page = draw()
    assert draw("--check")[0] == 0
    text = page.read_text()
    for table in tables.values():
        assert f"### {table.title}" in text
        for row in table.rows:
            assert f"| {row.case} | " in text
    assert "goals met" in text


def test_the_page_in_the_tree_is_what_its_results_say():
    assert SECTION.main(["--check"]) == 0
