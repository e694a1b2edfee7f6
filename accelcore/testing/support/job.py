"""The suite's jobs of two and three ranks: run once for a backend, read by every test that needs them."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import accelcore
from accelcore import Backend
from accelcore.jobs.launchers import outside_any_job
from accelcore.testing.support import ranks
from accelcore.util import child_process

_SECONDS = 300  # more than the limits of both jobs, which name the rank that hangs


def two_ranks(accel: Backend, part: str) -> list[dict[str, Any]]:
    """Return what each of two ranks found in a part of the job: `"collectives"`, or a strategy's name.

    Skip the test if there are fewer than two devices and ranks cannot share one. If a rank fails, the parts before it
    count.
    """
    return _part(accel, part, 2)


def three_ranks(accel: Backend) -> list[dict[str, Any]]:
    """Return what each of three ranks found in groups of two of them. Skip the test without three devices."""
    return _part(accel, "groups", 3)


def _part(accel: Backend, part: str, count: int) -> list[dict[str, Any]]:
    probe = accelcore.installed()[accel.name]
    if probe.exclusive and probe.count < count:
        pytest.skip(f"{count} ranks need {count} {accel.name} devices, and the number of them is {probe.count}")
    found, failure = _run(accel.name, min(probe.count, 3) if probe.exclusive else 0)[count]
    if failure and not all(part in rank for rank in found):
        pytest.fail(failure)
    return [rank[part] for rank in found]


@cache
def _run(name: str, exclusive: int) -> dict[int, tuple[list[dict[str, Any]], str]]:
    """Return the parts that each rank finished, and how the job failed, by the number of ranks.

    Args:
        name: of the backend.
        exclusive: the number of devices if each rank needs one of its own; else 0.
    """
    environ = outside_any_job(os.environ)  # a new job
    environ.pop("ACCEL_DEVICE", None)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))  # they run at the same time
    with tempfile.TemporaryDirectory(prefix="accelcore-") as folder:
        devices = [f"{name}:{rank}" for rank in range(exclusive)] or [name] * 3
        command = [sys.executable, "-m", ranks.__name__, folder, *devices]
        (ended,) = child_process.run_together([child_process.watch(command, environ=environ, limit=_SECONDS)])
        return {count: _found(Path(folder, str(count)), count, ended) for count in (2, 3)}


def _found(folder: Path, count: int, ended: child_process.Ended) -> tuple[list[dict[str, Any]], str]:
    """Return the parts that each rank of a job finished, and how the job failed; empty if it did not."""
    found = [json.loads(_read(folder / f"{rank}.json") or "{}") for rank in range(count)]
    others = f"the process that forks it, {ended.status}" if ended.status else f"no end within {_SECONDS} seconds"
    codes = [_read(folder / f"{rank}.code") or others for rank in range(count)]
    if set(codes) == {"0"}:
        return found, ""
    said = [_read(folder / f"{rank}.stderr") or ended.stderr for rank in range(count)]
    ends = [f"rank {rank} ended with {code}: {_error_in(said[rank])}" for rank, code in enumerate(codes)]
    for parts in found:
        parts.pop("closed", None)  # a rank that ends with an error did not close the job
    return found, "\n".join([*ends, *(text[-2000:] for text in said)])


def _read(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _error_in(said: str) -> str:
    """Return where a rank hangs, or else the last line of its output that names an error, or else the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    stacks = [place for head, place in pairwise(lines) if re.match(r"Thread .*most recent call first", head)]
    if stacks:
        return f"it hangs in {stacks[-1].strip()}"  # of the main thread, whose stack is written last
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1]
