"""Reports of the suite's job of two ranks if one of them fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelcore_cpu.backend import create

from accelcore.testing.support import job

SAID = "Traceback (most recent call last):\n[rank0]: RuntimeError: no ring\n[rank0]:   a note on it\nleft running\n"


class Rank:
    """Process of a rank: rank 0 fails in its second part."""

    def __init__(self, command, *, env, stderr, **_):
        self.rank = int(env["ACCEL_TEST_RANK"])
        parts = {"collectives": {"rank": self.rank}}
        if self.rank:
            parts |= {"fsdp": {}, "closed": {}}
        else:
            stderr.write(SAID)
        Path(command[-1], f"{self.rank}.json").write_text(json.dumps(parts))

    def wait(self, *_):
        return 0 if self.rank else 1

    def kill(self):
        pass


def test_parts_before_a_failure_count_and_the_others_name_the_error_first(monkeypatch):
    fake = SimpleNamespace(Popen=Rank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(job, "subprocess", fake)
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
