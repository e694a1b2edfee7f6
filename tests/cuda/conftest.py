"""Tests that need a GPU. Without one each is skipped, and says that it was not run on hardware.

They need torch and pytest. Where accelcore is not installed the tree is used. Where rich or matplotlib is not
installed, which only show things, a stand-in takes its place, and the report's header names it; a test that needs
another package, whose stand-in would be what is tested, is skipped and says so. Run
`pytest --confcutdir tests/cuda tests/cuda` from the root of the tree.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_PACKAGES = ("safetensors", "sklearn")  # what tests need beside torch, and nothing can stand in for
_ELSEWHERE = ("ACCEL_DEVICE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WARNINGS = (
    # What torch says to itself when it compiles fp32 products for a GPU that has TF32.
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available:UserWarning",
    # What Python 3.12 says of every loader worker that is forked beside CUDA's threads.
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    # What torch says once of the mode in which tests see that nothing waits.
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",
    # What torch says where the first thing that a thread of autograd's does is a matrix product.
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
    # What torch 2.11 says of the empty graph that mode="reduce-overhead" begins with.
    "ignore:The CUDA Graph is empty:UserWarning",
)


def _importable(*folders: Path) -> None:
    """Make what is in these folders importable, here and in child processes."""
    paths = [str(folder) for folder in folders]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def _use_tree() -> None:
    """Make the packages of this tree importable, and known as plugins."""
    made = Path(tempfile.mkdtemp(prefix="accelcore-tree-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for name in ("accelcore", "accelcore-cpu", "accelcore-cuda"):
        folder = made / f"{name.replace('-', '_')}-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        if name != "accelcore":
            points = f"[accelcore.backends]\n{name.partition('-')[2]} = {name.replace('-', '_')}\n"
            (folder / "entry_points.txt").write_text(points)
    _importable(ROOT, ROOT / "plugins/cpu", ROOT / "plugins/cuda", made)


def _use_stand_ins() -> list[str]:
    """Put stand-ins in the place of packages that are not installed; their names."""
    missing = [folder for folder in sorted((HERE / "stand_ins").iterdir()) if find_spec(folder.name) is None]
    _importable(*missing)
    return [folder.name for folder in missing]


if "cuda" not in {point.name for point in entry_points(group="accelcore.backends")}:
    _use_tree()

import accelcore  # noqa: E402

with warnings.catch_warnings():
    # torch says this once, when it is imported, and warnings are errors here.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch

from accelcore.testing.support.usable import check_usable, why_unusable  # noqa: E402


@cache
def _why_not() -> str:
    """Why there is no GPU to run on; empty where there is one, also if only torch finds it."""
    probe = accelcore.installed()["cuda"]
    return "" if probe.available or torch.cuda.is_available() else f"NOT RUN ON HARDWARE: {probe.reason}"


# Only where they serve: in a run without a GPU other tests should see what is installed, and nothing else.
STAND_INS = [] if _why_not() else _use_stand_ins()


def pytest_report_header() -> str:
    found = f"cuda: {_why_not() or accelcore.installed()['cuda'].reason}"
    return f"{found}; stand-ins for {', '.join(STAND_INS)}" if STAND_INS else found


class _NotRun(pytest.Module):
    """A module in place of one that needs a GPU: it is not imported, and says why."""

    def collect(self) -> NoReturn:
        pytest.skip(f"{self.path.name}: {_why_not()}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HERE in module_path.parents and _why_not():
        module: pytest.Module = _NotRun.from_parent(parent, path=module_path)
        return module
    return None


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip, and say so, what fails for want of a package."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if HERE in pyfuncitem.path.parents and package in _PACKAGES:
            pytest.skip(f"NOT RUN: {package} is not installed")
        raise


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skips a test whose child processes need packages, where one of them is not installed."""

    def check(*packages: str) -> None:
        for package in packages:
            if find_spec(package) is None:
                pytest.skip(f"NOT RUN: {package} is not installed")

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in _WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what the shell it was started from says to accelcore."""
    for variable in _ELSEWHERE:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def _usable_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip what follows a kernel that makes the GPU unusable, and say once which test that was."""
    if why_unusable():
        pytest.skip(f"not run: {why_unusable()}")
    yield
    if not why_unusable():
        check_usable(torch.device("cuda"), request.node.nodeid)


@pytest.fixture
def accel() -> accelcore.Backend:
    """The GPU, selected as a user would."""
    return accelcore.select("cuda")


@contextmanager
def _no_waiting() -> Iterator[None]:
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_waiting() -> Callable[[], AbstractContextManager[None]]:
    """A context in which torch raises where the host would wait for the GPU."""
    return _no_waiting


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
