"""Pytest plugin that writes a line when each test of the suite begins and ends.

`accelcore verify` starts it in a child process. If a backend crashes the process, the lines tell in which test, and the
next process continues with the test after it. A process whose device has become unusable ends.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import accelcore
from accelcore.testing.support import UNUSABLE
from accelcore.testing.support.declared import NOT_DECLARED
from accelcore.testing.support.usable import why_unusable

_LONGEST = 4000
_ALLOCATED = 50_000  # objects, before Python looks for garbage
_END = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options: the backend to verify, and the file of the report."""
    parser.addoption("--accelcore-backend", required=True)
    parser.addoption("--accelcore-report", required=True, type=Path)


@pytest.fixture(scope="class")
def accel(request: pytest.FixtureRequest) -> accelcore.Backend:
    """Select the backend as a user would, once for a role: to select it for each test takes a quarter of the time."""
    return accelcore.select(request.config.getoption("--accelcore-backend"))


@pytest.fixture(autouse=True, scope="session")
def _no_seeds_for_absent_devices() -> Iterator[None]:
    """Let `torch.manual_seed` not keep, for each kind of device that is absent, the lines that called it.

    To find them takes milliseconds a call, together a twentieth of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in [each for each in vars(torch).values() if isinstance(each, ModuleType)]:
            if "manual_seed_all" in vars(module) and not module.is_available():  # a kind of device
                patch.setattr(module, "manual_seed_all", lambda seed: None)
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    """Write which backend is verified, and look for garbage less often, which else takes a tenth of the time."""
    gc.set_threshold(_ALLOCATED)
    try:
        backend = accelcore.select(session.config.getoption("--accelcore-backend"))
    except accelcore.AccelError as error:
        raise pytest.UsageError(str(error)) from error
    _write(
        session.config,
        event="backend",
        name=backend.name,
        index=backend.index,
        device=str(backend.device),
        emulated=backend.emulated,
        torch=torch.__version__,
        capabilities=dataclasses.asdict(backend.capabilities),
    )


@pytest.hookimpl(trylast=True)  # once the others have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Write how many tests there are, but not those that an earlier process has begun."""
    _write(config, event="collected", count=len(items))
    begun = set()
    for line in config.getoption("--accelcore-report").read_text("utf-8").splitlines():
        with suppress(ValueError):  # a process that was killed may have written half a line
            begun.add(json.loads(line).get("id"))
    items[:] = [item for item in items if item.nodeid not in begun]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write that all tests were run: a process may end early with a good exit code."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        _write(session.config, event="done")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write that a test begins, and after its teardown how it ended."""
    _write(item.config, event="begin", id=item.nodeid, **_described(item))
    result = yield
    _write(item.config, event="end", id=item.nodeid, **item.stash[_END])
    if why_unusable():
        pytest.exit(why_unusable(), returncode=UNUSABLE)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keep the outcome of a test's call, setup or teardown."""
    report: pytest.TestReport = yield
    if report.when == "call" or not report.passed:
        outcome, why = _judged(report)
        where = _places(report) if outcome == "failed" else []
        traceback = report.longreprtext[-_LONGEST:] if outcome == "failed" else ""
        item.stash[_END] = {
            "outcome": outcome, "why": why, "where": where, "traceback": traceback,
            "seconds": round(report.duration, 3),
            **{name: dict(report.user_properties).get(name, "") for name in ("known_bug", "on_host")},
        }  # fmt: skip
    return report


def _described(item: pytest.Item) -> dict[str, str]:
    assert isinstance(item, pytest.Function), "the suite is made of functions in classes"
    documented = item.function.__doc__ or item.originalname
    case = item.name.partition("[")[2].rstrip("]")
    role = item.cls.__name__.removeprefix("Test").lower()
    return {"role": role, "name": item.originalname, "case": case, "what": documented.strip().splitlines()[0]}


def _judged(report: pytest.TestReport) -> tuple[str, str]:
    if report.skipped:
        assert isinstance(report.longrepr, tuple), "a skip has a place and a reason"
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason.startswith("not declared"):
            return "not declared", reason.removeprefix(NOT_DECLARED).removeprefix("not declared: ")
        return "not tried", reason
    if report.passed:
        return "passed", ""
    crash = getattr(report.longrepr, "reprcrash", None)
    return "failed", (crash.message if crash else report.longreprtext)[:_LONGEST]


def _places(report: pytest.TestReport) -> list[str]:
    """Return file and line of each call on the way to the failure, from the test down."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    places = [getattr(entry, "reprfileloc", None) for entry in entries]
    crash = getattr(report.longrepr, "reprcrash", None)
    return [f"{place.path}:{place.lineno}" for place in (*places, *([] if any(places) else [crash])) if place]


def _write(config: pytest.Config, **entry: object) -> None:
    with config.getoption("--accelcore-report").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, default=str) + "\n")
