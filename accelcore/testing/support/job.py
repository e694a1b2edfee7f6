"""The suite's job of two ranks: run once for a backend, read by every test that needs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
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
        processes = []
        for rank in range(2):
            device = f"{name}:{rank}" if exclusive else name
            with Path(folder, f"{rank}.stderr").open("w", encoding="utf-8") as stderr:
                processes.append(
                    subprocess.Popen(  # noqa: S603  # this Python, on a module of this package
                        [sys.executable, "-m", ranks.__name__, device, folder],
                        env={**environ, "ACCEL_TEST_RANK": str(rank)},
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                    )
                )  # fmt: skip
        codes: list[int | str] = []
        try:
            for process in processes:
                try:
                    codes.append(process.wait(_SECONDS))
                except subprocess.TimeoutExpired:
                    codes.append(f"no end within {_SECONDS} seconds")
        finally:  # also if the tests are interrupted
            for process in processes:
                process.kill()
                process.wait()
        written = [Path(folder, f"{rank}.json") for rank in range(2)]
        found = [json.loads(path.read_text("utf-8")) if path.exists() else {} for path in written]
        if codes == [0, 0]:
            return found, ""
        said = [Path(folder, f"{rank}.stderr").read_text("utf-8", "replace")[-2000:] for rank in range(2)]
        ends = [f"rank {rank} ended with {code}: {_error_in(said[rank])}" for rank, code in enumerate(codes)]
        for parts in found:
            parts.pop("closed", None)  # a rank that ends with an error did not close the job
        return found, "\n".join([*ends, *said])


def _error_in(said: str) -> str:
    """Return the last line of a rank's output that names an error, or else the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)]
    return (errors or lines or [""])[-1]
