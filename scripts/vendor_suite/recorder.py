"""A pytest plugin that notes how each test ended as it ends, so that a process that dies takes one test along.

`VENDOR_SUITE_RECORD` names the file: a line of JSON when a test starts and one when it has ended. Tests that are in it
already are left out, so that a run goes on where the one before it died.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_RECORD = Path(os.environ["VENDOR_SUITE_RECORD"])
_LONGEST = 4000  # characters of a failure, from its end

_failures: list[str] = []
_skipped: list[str] = []


def _write(**entry: Any) -> None:
    with _RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what has started before, and set what torch's tests expect of their own `run_tests`."""
    torchs = sys.modules.get("torch.testing._internal.common_utils")
    if torchs is not None and torchs.GRAPH_EXECUTOR is None:
        torchs.GRAPH_EXECUTOR = torchs.cppProfilingFlagsToProfilingMode()
    lines = _RECORD.read_text(encoding="utf-8").splitlines() if _RECORD.exists() else []
    seen = {json.loads(line).get("start") for line in lines}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in seen])
    items[:] = [item for item in items if item.nodeid not in seen]


def pytest_collectreport(report: Any) -> None:
    """A file that cannot be read is one failure."""
    if report.failed:
        _write(start=report.nodeid)
        _write(end=report.nodeid, outcome="failed", text=str(report.longrepr)[-_LONGEST:])
    elif report.skipped:
        _write(start=report.nodeid)
        _write(end=report.nodeid, outcome="skipped", text=str(report.longrepr)[-_LONGEST:])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note who would be to blame."""
    _failures.clear()
    _skipped.clear()
    _write(start=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep what went wrong, in whatever phase or part of the test."""
    if report.failed:
        said = "\n".join(text[-_LONGEST // 2 :] for name, text in report.sections if "stderr" in name)
        _failures.append(f"{said}\n{report.longreprtext[-_LONGEST:]}")
    elif report.skipped:
        _skipped.append(report.longreprtext[-_LONGEST:])


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Note how it ended."""
    outcome = "failed" if _failures else "skipped" if _skipped else "passed"
    _write(end=nodeid, outcome=outcome, text="\n".join(_failures or _skipped))
