"""Child processes of the commands."""

import os
import sys

import pytest

from accelcore.util import child_process


def test_an_error_of_one_ends_the_others(tmp_path):
    said = tmp_path / "pid"
    waits = [
        sys.executable,
        "-S",
        "-c",
        f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(99)",
    ]

    def fails_when_it_waits():
        while not (said.is_file() and said.read_text()):
            yield
        raise RuntimeError("the other one")

    with pytest.raises(RuntimeError, match="the other one"):
        child_process.run_together([child_process.watch(waits, environ=os.environ, limit=99), fails_when_it_waits()])
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


def test_what_each_returns_is_in_order():
    programs = [
        [sys.executable, "-S", "-c", f"import sys; print({name!r}); sys.exit({code})"]
        for name, code in (("a", 3), ("b", 0))
    ]
    first, second = child_process.run_together(
        [child_process.watch(program, environ=os.environ, limit=99) for program in programs]
    )
    assert (first.status, first.stdout) == (3, "a\n")
    assert (second.status, second.stdout) == (0, "b\n")
