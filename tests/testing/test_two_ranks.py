"""Reports of the suite's job of two ranks if one of them fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelcore_cpu.backend import create

from accelcore.testing.support import job
from accelcore.util import child_process

SAID = "Traceback (most recent call last):\n[rank0]: RuntimeError: no ring\n[rank0]:   a note on it\nleft running\n"


class Job:
    """Process that forks two ranks, of which rank 0 fails in its second part."""

    pid = 2**31 - 1  # of no process

    def __init__(self, command, **_):
        folder, *devices = map(Path, command[3:])
        for rank in range(len(devices)):
            parts = {"collectives": {"rank": rank}} | ({"fsdp": {}, "closed": {}} if rank else {})
            (folder / f"{rank}.json").write_text(json.dumps(parts))
            (folder / f"{rank}.stderr").write_text("" if rank else SAID)
            (folder / f"{rank}.code").write_text("0" if rank else "1")

    def wait(self, *_):
        return 1


def test_parts_before_a_failure_count_and_the_others_name_the_error_first(monkeypatch):
    fake = SimpleNamespace(Popen=Job, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(child_process, "subprocess", fake)
    job._run.cache_clear()
    try:
        assert job.two_ranks(create(), "collectives") == [{"rank": 0}, {"rank": 1}]
        for part in ("fsdp", "closed"):
            with pytest.raises(pytest.fail.Exception) as failure:
                job.two_ranks(create(), part)
            first, second, *_ = str(failure.value).splitlines()
            assert first == "rank 0 ended with 1: [rank0]: RuntimeError: no ring"
            assert second.startswith("rank 1 ended with 0:")
    finally:
        job._run.cache_clear()
