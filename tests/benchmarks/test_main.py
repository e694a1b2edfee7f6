"""Starting a benchmark: as a command, and what is kept of one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks.__main__ as command
from benchmarks.report import Goal, Row, Table

ROOT = Path(__file__).parents[2]
# launches needs torch-npu, and is started by a test of the NPU's plugin.
NAMES = [name for name in command._BENCHMARKS if name != "launches"]


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_what_starts_it(name):
    module = import_module(f"benchmarks.{name}")
    assert callable(module.run)
    assert "torch" in module.DISTRIBUTIONS


@pytest.mark.full  # half a minute to some minutes each
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_runs_to_its_end(name, tmp_path):
    output = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # 1: a goal is missed, as may be on a busy machine
    found = json.loads(output.read_text())
    assert (found["benchmark"], found["quick"]) == (name, True)
    assert all(table["rows"] for table in found["tables"])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_tables_that_are_done_are_kept_if_a_later_one_fails(tmp_path, monkeypatch, capsys):
    def run(quick):
        yield Table("first", "a", "s", {}, [Row("a", None, counts={"things": 3})], [Goal("few", 5, 3)])
        raise RuntimeError("out of luck")

    monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(run=run, DISTRIBUTIONS=("torch",)))
    output = tmp_path / "found.json"
    output.write_text("of an earlier run")
    with pytest.raises(RuntimeError, match="luck"):
        command.main(["startup", "--output", str(output)])
    assert output.read_text() == "of an earlier run"
    kept = json.loads((tmp_path / "found-unfinished.json").read_text())
    assert [table["title"] for table in kept["tables"]] == ["first"]


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmarks.launches", raising=False)
    monkeypatch.setitem(sys.modules, "accelcore_npu_emulator", None)
    assert command.main(["launches"]) == 2
    said = capsys.readouterr().err
    assert "accelcore_npu_emulator" in said
    assert "tox run -e bench-npu" in said
