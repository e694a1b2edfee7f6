"""Tests that need a GPU. Without one each is skipped, and says that it was not run on hardware.

They need torch and pytest; what else a test needs, and is not installed, it names when it is skipped. Where accelcore is
not installed the tree is used: run `pytest --confcutdir tests/cuda tests/cuda` from its root.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_ELSEWHERE = ("ACCEL_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# torch says this to itself, when it compiles fp32 products for a GPU that has TF32.
_WARNINGS = ("ignore:TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",)


def _use_tree() -> None:
    """Make the packages of this tree importable, and known as plugins, here and in child processes."""
    made = Path(tempfile.mkdtemp(prefix="accelcore-tree-"))
    for name in ("accelcore", "accelcore-cpu", "accelcore-cuda"):
        folder = made / f"{name.replace('-', '_')}-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        if name != "accelcore":
            points = f"[accelcore.backends]\n{name.partition('-')[2]} = {name.replace('-', '_')}\n"
            (folder / "entry_points.txt").write_text(points)
    added = [str(path) for path in (ROOT, ROOT / "plugins/cpu", ROOT / "plugins/cuda", made)]
    sys.path[:0] = added
    os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])


if "cuda" not in {point.name for point in entry_points(group="accelcore.backends")}:
    _use_tree()

import accelcore


def _why_not() -> str:
    """Why there is no GPU to run on; empty where there is one, also if only torch finds it."""
    import torch

    probe = accelcore.installed()["cuda"]
    return "" if probe.available or torch.cuda.is_available() else f"NOT RUN ON HARDWARE: {probe.reason}"


def pytest_report_header() -> str:
    reason = _why_not()
    if reason:
        return f"cuda: {reason}"
    import torch

    return f"cuda: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if mine else ""
    for item in mine:
        for warning in _WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "test_resume_goes_on_alike" in item.name and importlib.util.find_spec("safetensors") is None:
            item.add_marker(pytest.mark.skip(reason="needs safetensors, which is not installed"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what the shell it was started from says to accelcore."""
    for variable in _ELSEWHERE:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def accel() -> accelcore.Backend:
    """The GPU, selected as a user would."""
    return accelcore.select("cuda")


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Run a script in a Python of its own, behind a launcher if one is given; its output. It must succeed."""

    def run(script: str, *launcher: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, *launcher, str(path)], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
