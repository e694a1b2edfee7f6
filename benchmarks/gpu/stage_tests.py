"""The tests that need a GPU, run by pytest in a process of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.results import Findings, Goal
from benchmarks.gpu.tree import ROOT

__all__ = ["read_report", "run"]

_ENDING = 20.0
"""Seconds that pytest gets to write its report when it is interrupted."""
_ENVIRONMENT = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins that happen to be installed may warn: an error in the tests
    "OMP_NUM_THREADS": "1",  # in each of the processes below
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
_MOST_PROCESSES = 14
"""Processes that share the GPU: most of a test's time is that of the host."""


def run(device: Device, deadline: Deadline) -> Findings:
    """How many tests passed, and which did not."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "--confcutdir", "tests/cuda", "--durations", "10", "tests/cuda" + "/test_device.py" * device.toy,
        *_processes(device),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        child = subprocess.Popen([*command, f"--junit-xml={report}"], cwd=ROOT, env={**os.environ, **_ENVIRONMENT})
        over = ""
        try:
            child.wait(timeout=max(1.0, deadline.left - _ENDING))
        except subprocess.TimeoutExpired:
            over = "the tests were interrupted: they took longer than this stage may"
            child.send_signal(signal.SIGINT)
            try:
                child.wait(timeout=_ENDING / 2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if not report.exists():
            return Findings({}, failures=[over or f"pytest ended with status {child.returncode} and wrote no report"])
        counts, failures = read_report(report)
    goals = () if device.rehearsal else (Goal("tests: passed on the GPU", 1, counts["passed"], at_least=True),)
    settings = {"command": " ".join(["python", *command[1:]]), **counts}
    return Findings(settings, goals=goals, failures=[*([over] if over else []), *failures])


def _processes(device: Device) -> list[str]:
    """Return pytest's options for several processes, if pytest-xdist is installed and there is a GPU to share."""
    if not device.cuda or find_spec("xdist") is None:
        return []
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - 2))
    return ["-p", "xdist.plugin", "-n", str(processes), "--dist", "worksteal"]


def read_report(path: Path) -> tuple[dict[str, int], list[str]]:
    """Counts by outcome, and a line for each test that failed, from a report in JUnit's format."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(path).iter("testcase"):
        bad = [*case.iter("failure"), *case.iter("error")]
        counts["failed" if bad else "skipped" if case.find("skipped") is not None else "passed"] += 1
        for element in bad[:1]:
            message = (element.get("message") or "").strip().splitlines() or [element.tag]
            failures.append(f"{case.get('classname')}::{case.get('name')}: {message[0][:300]}")
    return counts, failures
