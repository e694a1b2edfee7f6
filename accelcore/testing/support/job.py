"""The suite's job of two ranks: run once for a backend, read by every test that needs it."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import accelcore
from accelcore import Backend
from accelcore.jobs.launchers import outside_any_job
from accelcore.testing.support import ranks
from accelcore.util import child_process

_RANKS = 2
_SECONDS = 180


def two_ranks(accel: Backend, part: str) -> list[dict[str, Any]]:
    """Return what each of two ranks found in a part of the job: `"collectives"`, or a strategy's name.

    Skip the test if there are fewer than two devices and ranks cannot share one. If a rank fails, the parts before it
    count.
    """
    probe = accelcore.installed()[accel.name]
    if probe.exclusive and probe.count < 2:
        pytest.skip(f"two ranks need two devices, and there is one {accel.name}")
    found, failure = _run(accel.name, probe.exclusive)
    if failure and not all(part in rank for rank in found):
        pytest.fail(failure)
    return [rank[part] for rank in found]


@cache
def _run(name: str, exclusive: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the parts that each rank finished, and how the job failed; empty if it did not."""
    environ = outside_any_job(os.environ)  # a new job
    environ.pop("ACCEL_DEVICE", None)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))  # they run at the same time
    with tempfile.TemporaryDirectory(prefix="accelcore-") as folder:
        devices = [f"{name}:{rank}" if exclusive else name for rank in range(_RANKS)]
        command = [sys.executable, "-m", ranks.__name__, folder, *devices]
        (ended,) = child_process.run_together([child_process.watch(command, environ=environ, limit=_SECONDS)])
        found = [json.loads(_read(folder, f"{rank}.json") or "{}") for rank in range(_RANKS)]
        if ended.status == 0:
            return found, ""
        said = [_read(folder, f"{rank}.stderr")[-2000:] or ended.stderr for rank in range(_RANKS)]
        others = f"the process that forks it, {ended.status}" if ended.status else f"no end within {_SECONDS} seconds"
        codes = [_read(folder, f"{rank}.code") or others for rank in range(_RANKS)]
        ends = [f"rank {rank} ended with {code}: {_error_in(said[rank])}" for rank, code in enumerate(codes)]
        for parts in found:
            parts.pop("closed", None)  # a rank that ends with an error did not close the job
        return found, "\n".join([*ends, *said])


def _read(folder: str, name: str) -> str:
    path = Path(folder, name)
    return path.read_text("utf-8", "replace") if path.exists() else ""


def _error_in(said: str) -> str:
    """Return the last line of a rank's output that names an error, or else the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1]
