"""The backend that `accelcore new-backend` writes: installed as anybody's would be, verified, printed in the docs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelcore.cli.commands import write_backend
from accelcore.devices.select import ten_lines

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "third_party"
FILES = (
    "pyproject.toml",
    "accelcore_hostchip/__init__.py",
    "accelcore_hostchip/backend.py",
    "tests/test_conformance.py",
    "accelcore_hostchip/lion.py",
    "tests/test_lion.py",
)
"""In the order of the page."""


ROLES = {
    "backend", "runtime", "precision", "scaler", "collectives", "compiler", "optimizers", "training", "parallel",
    "operators",
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where the package is installed, from the files that `accelcore new-backend` writes."""
    sources, site = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    write_backend("hostchip", sources / "hostchip")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), *map(str, sources.iterdir())], check=True, timeout=120, cwd=site)
    return site


@pytest.fixture(scope="module")
def hostchip(site):
    """Runs Python where the package is installed."""

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=240, cwd=site,
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    return run


def test_it_is_in_the_examples():
    written = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".md")
    }
    assert written == {*FILES, "README.md"}


def test_the_backend_is_under_40_lines_with_one_entry_point():
    files = (PACKAGE / "accelcore_hostchip" / name for name in ("__init__.py", "backend.py"))
    assert 0 < sum(len(path.read_text().splitlines()) for path in files) < 40
    assert len(re.findall("entry-points", (PACKAGE / "pyproject.toml").read_text())) == 1


# What it computes is the CPU's, which the tests of lies cover; below, its own tests ask what it declares, and
# `tox run -e readme` has the command and its process.
@pytest.mark.full
def test_it_conforms(hostchip):
    done = hostchip("-m", "accelcore", "verify", "backend", "hostchip", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["conforms"]
    assert set(card["roles"]) == ROLES
    assert all(counts["failed"] == 0 for counts in card["roles"].values())
    refused = [test["why"] for test in card["tests"] if test["outcome"] == "not declared"]
    assert any(reason.startswith("a compiler") for reason in refused)


def test_the_ranks_of_the_suite_start_as_processes(hostchip, tmp_path):
    """Elsewhere the process that forks them is a fork, too."""
    done = hostchip("-m", "accelcore.testing.support.ranks", tmp_path, "nowhere", "nowhere")
    assert done.returncode == 1
    assert "there is no backend 'nowhere'" in (tmp_path / "2" / "0.stderr").read_text()


def test_its_own_tests_pass(site, fork, import_from):
    import_from(site)
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "TestBackend or test_lion or gelu"
    done = fork(*words, PACKAGE / "tests", PYTHONPATH=str(site)).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "failed" not in done.stdout


def test_it_trains_an_example_unchanged(site, fork, tmp_path, import_from):
    import_from(site)
    variables = {"ACCEL_DEVICE": "hostchip", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = fork(ROOT / "examples" / "own_loop.py", "--output", tmp_path, **variables).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^accuracy on held-out pictures: (0\.9|1\.0)", done.stdout, re.M)


def test_the_page_prints_what_the_command_writes():
    page = (ROOT / "docs" / "bring_your_own.md").read_text()
    blocks = re.findall(r"^```(?:toml|python)\n(.*?)^```", page, re.M | re.S)
    assert blocks[0] == ten_lines("mychip")
    written = [(PACKAGE / name).read_text() for name in FILES]
    assert [block for block in blocks if block in written] == written
