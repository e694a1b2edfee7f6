"""README's first script keeps its promise: it can be killed at any moment, and be run again when it is finished."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SCRIPT = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)[0]
FOLDER = Path("outputs/readme")

# A file that is opened, made, renamed or removed in the folder of checkpoints is a moment; the process dies in one.
DIES = """
import os, signal, sys

left = [{moments}]


def watch(event, arguments):
    if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove") and "readme" in str(arguments[0]):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(watch)
"""


@pytest.fixture
def run(fork, tmp_path, monkeypatch):
    """Runs the script, as printed; with `moments`, until it dies in that one of the moments in which it saves."""
    monkeypatch.chdir(tmp_path)

    def begin(moments=0):
        (tmp_path / "first.py").write_text(DIES.format(moments=moments) + SCRIPT if moments else SCRIPT)
        return fork(tmp_path / "first.py").finish()

    return begin


def folder():
    return {path: path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}


def model():
    return max(FOLDER.glob("step-*")).joinpath("model.safetensors").read_bytes()


# In the first save of a run, or a later one: begun, written, renamed, cleared.
@pytest.mark.parametrize("moments", [(9, 90), pytest.param((3, 9, 40, 53, 90), marks=pytest.mark.full)], ids=str)
def test_it_is_killed_and_ends_as_if_it_had_not_been(run, moments):
    undisturbed = run()
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected, lines = model(), undisturbed.stdout.splitlines()
    assert len(lines) == 10
    for path in sorted(FOLDER.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()

    for moment in moments:
        killed = run(moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = run()
    assert last.returncode == 0, last.stderr
    assert model() == expected
    assert last.stdout.splitlines() == lines[-len(last.stdout.splitlines()) :]
    assert 0 < len(last.stdout.splitlines()) < 10

    files = folder()
    again = run()
    assert again.returncode == 0, again.stderr
    assert again.stdout == ""
    assert "this training is finished (epochs done: 10, asked for: 10)" in again.stderr
    assert folder() == files


def test_it_runs_where_no_strategy_is_declared(fakes, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    fakes.install(
        """
        import dataclasses
        from accelcore import Probe, hookimpl
        from accelcore.jobs.collectives import NoCollectives

        @hookimpl
        def accelcore_probe():
            return Probe("lone", available=True, count=1, reason="", remedy="")

        @hookimpl
        def accelcore_create_backend(name, index):
            from accelcore_cpu.backend import create
            cpu = create()
            return dataclasses.replace(
                cpu, name="lone", collectives=NoCollectives(),
                capabilities=dataclasses.replace(cpu.capabilities, process_groups=(), parallel=("none",)),
            )
        """,
        backends=["lone"],
    )
    monkeypatch.setenv("ACCEL_DEVICE", "lone")
    monkeypatch.setattr(sys, "argv", ["first.py", "2"])
    exec(compile(SCRIPT, "first.py", "exec"), {})
    assert max(FOLDER.glob("step-*")).name == "step-00000016"


def test_the_lines_for_a_cpu_build_name_the_torch_of_the_tests():
    """Without constraints.txt: the index of CPU builds lacks other versions that stand in it, such as setuptools's."""
    root = Path(__file__).parents[2]
    (pin,) = [line for line in (root / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    for page in ("README.md", "docs/install.md", "scripts/set_up.py"):
        assert f"pip install {pin} --index-url" in (root / page).read_text(), page
