"""The backend of examples/third_party: installed as anybody's would be, shown, verified, and printed in the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "third_party"
LION = ROOT / "examples" / "third_party_lion"


# What the package has of its own, or refuses. Operators, optimizers and training are the CPU's here, which the tests of
# lies cover: `full` runs them, too.
ROLES = {"backend", "precision", "scaler", "collectives", "compiler", "runtime"}
EVERYTHING = {*ROLES, "optimizers", "training", "parallel", "operators"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Where both packages are installed."""
    sources, site = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("site")
    for package in (PACKAGE, LION):
        shutil.copytree(
            package, sources / package.name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        )
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


def test_it_is_under_60_lines_with_one_entry_point():
    lines = [line for path in (PACKAGE / "accelcore_hostchip").glob("*.py") for line in path.read_text().splitlines()]
    assert 0 < len(lines) < 60
    assert len(re.findall("entry-points", (PACKAGE / "pyproject.toml").read_text())) == 1


def test_doctor_finds_both_packages(hostchip):
    found = json.loads(hostchip("-m", "accelcore", "doctor", "--json").stdout)
    backend = next(entry for entry in found["backends"] if entry["name"] == "hostchip")
    assert (backend["state"], backend["distribution"]) == ("usable", "accelcore-hostchip 1.0")
    extension = next(entry for entry in found["extensions"] if entry["name"] == "lion")
    assert (extension["state"], extension["distribution"]) == ("loads", "accelcore-lion 1.0")


@pytest.mark.parametrize("roles", [ROLES, pytest.param(EVERYTHING, marks=pytest.mark.full)])
def test_it_conforms(hostchip, roles):
    only = [part for role in sorted(ROLES) for part in ("--only", role)] if roles == ROLES else []
    done = hostchip("-m", "accelcore", "verify", "backend", "hostchip", "--json", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["conforms"]
    assert set(card["roles"]) == roles
    assert all(counts["failed"] == 0 for counts in card["roles"].values())
    refused = [test["why"] for test in card["tests"] if test["outcome"] == "not declared"]
    for undeclared in ("autocast to float16", "a process group", "a compiler", "side streams"):
        assert any(reason.startswith(undeclared) for reason in refused), undeclared


def test_its_own_test_module_runs_the_suite(site, fork, monkeypatch):
    monkeypatch.syspath_prepend(site)
    module = PACKAGE / "tests" / "test_conformance.py"
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "TestBackend or TestCompiler"
    done = fork(*words, module, PYTHONPATH=str(site)).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout), done.stdout
    assert "failed" not in done.stdout


def test_it_trains_an_example_unchanged(site, fork, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(site)
    variables = {"ACCEL_DEVICE": "hostchip", "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = fork(ROOT / "examples" / "own_loop.py", "--output", tmp_path, **variables).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy 0.9" in done.stdout


def test_the_page_prints_it_as_it_is():
    page = (ROOT / "docs" / "bring_your_own.md").read_text()
    blocks = re.findall(r"^```(?:toml|python)\n(.*?)^```", page, re.M | re.S)
    paths = (
        PACKAGE / "pyproject.toml",
        PACKAGE / "accelcore_hostchip" / "__init__.py",
        PACKAGE / "accelcore_hostchip" / "backend.py",
        PACKAGE / "tests" / "test_conformance.py",
        LION / "accelcore_lion" / "lion.py",
        LION / "accelcore_lion" / "__init__.py",
        LION / "pyproject.toml",
    )
    assert blocks == [path.read_text() for path in paths]
