"""The NPU of these tests is the emulated one: the real torch_npu over an emulated CANN.

Tests that need torch_npu are collected where it is installed. With ACCEL_REQUIRE_EMULATED=1 its absence is an error, so
that a run which was to prove something cannot pass by leaving everything out.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from accelcore import Backend

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: a thread for each core would be too many

_SUBJECTS = Path(__file__).parent / "subjects"
_WITHOUT_TORCH_NPU = {"test_compatibility.py", "test_install.py", "test_libraries.py", "test_probe.py"}

collect_ignore = ["subjects"]

if find_spec("torch_npu") is not None:
    from accelcore_npu.emulator import activate

    activate()
    # Now, because torch's autograd engine counts the devices of each kind once, at the first backward pass of any.
    import torch_npu  # noqa: F401
elif os.environ.get("ACCEL_REQUIRE_EMULATED") == "1":
    raise pytest.UsageError("ACCEL_REQUIRE_EMULATED=1, and torch_npu is not installed")
else:
    collect_ignore += [path.name for path in Path(__file__).parent.glob("test_*.py")
                       if path.name not in _WITHOUT_TORCH_NPU]  # fmt: skip


def pytest_report_header() -> str:
    """Say what the results are worth."""
    return "npu: EMULATED" if find_spec("torch_npu") is not None else "npu: torch_npu is not installed"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what the shell it was started from says to accelcore or to a launcher."""
    for variable in ("ACCEL_DEVICE", "ASCEND_RT_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def accel() -> Iterator[Backend]:
    """The first emulated NPU, selected as a user would."""
    import accelcore

    backend = accelcore.select("npu:0")
    assert backend.emulated
    yield backend
    backend.runtime.synchronize()


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in a process of its own; keywords are added to its environment, None removes."""

    def start(*arguments: str, timeout: float = 60, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=variables
        )

    return start


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Run a script of `subjects/` as ranks of one job, as a launcher would; what each of them found."""

    def start(subject: str, *, ranks: int = 2, timeout: float = 100, **environment: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("job")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            variables = {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
            with (folder / f"output-{rank}").open("w") as output:
                command = [sys.executable, str(_SUBJECTS / subject), str(folder)]
                variables = {**os.environ, **variables, **environment}
                started.append(subprocess.Popen(command, stdout=output, stderr=output, env=variables))
        try:
            codes = [process.wait(timeout) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        assert codes == [0] * ranks, "\n".join((folder / f"output-{rank}").read_text() for rank in range(ranks))
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return start
