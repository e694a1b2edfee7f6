"""Reports of the suite's jobs of ranks if one of them fails or hangs."""

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
        folder = Path(command[3], "2")
        folder.mkdir()
        for rank in range(2):
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


HANGS = """
import signal, sys
from pathlib import Path
from accelcore.testing.support import ranks

def hang(rank, device, folder):
    if rank:
        signal.pause()

ranks.LIMITS[2] = 1.0
sys.exit(ranks.job_failed(hang, ["cpu", "cpu"], Path(sys.argv[1])))
"""


def test_a_rank_that_hangs_is_killed_and_its_place_named(fork, tmp_path):
    script, folder = tmp_path / "hangs.py", tmp_path / "2"
    script.write_text(HANGS)
    done = fork(script, folder).finish()
    assert done.returncode == 1, done.stderr
    _, failure = job._found(folder, 2, child_process.Ended(1, 1.0, 1.0, "", ""))
    named = failure.splitlines()[1]
    assert named.startswith("rank 1 ended with no end within 1 seconds: ")
    assert named.endswith(f'"{script}", line 8 in hang')
