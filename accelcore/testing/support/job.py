"""The suite's job of two ranks: run once for a backend, read by every test that needs it."""

from __future__ import annotations

import json
import os
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

    Skip the test if there are fewer than two devices and ranks cannot share one.
    """
    probe = accelcore.installed()[accel.name]
    if probe.exclusive and probe.count < 2:
        pytest.skip(f"two ranks need two devices, and there is one {accel.name}")
    outcome = _run(accel.name, probe.exclusive)
    if isinstance(outcome, str):
        pytest.fail(outcome)
    return [rank[part] for rank in outcome]


@cache
def _run(name: str, exclusive: bool) -> list[dict[str, Any]] | str:
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
        if codes != [0, 0]:
            said = [Path(folder, f"{rank}.stderr").read_text("utf-8", "replace")[-2000:] for rank in range(2)]
            return "\n".join(f"rank {rank} ended with {code}:\n{said[rank]}" for rank, code in enumerate(codes))
        return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(2)]
