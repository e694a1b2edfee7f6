"""Child processes that may crash, exit, hang, or leave other processes behind.

A child that runs a module of this package has the `sys.path` of this process. `python -m` would put the working
directory first, which could hold a file with a package's name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_CALL = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from {module} import main; sys.exit(main())"

_LOOK = 0.2  # seconds between looks at a file that shows progress


@dataclass(frozen=True)
class Ended:
    """End and output of a child process."""

    status: int | None  # its exit code; below 0 the signal that ended it; None if it was killed after the time limit
    limit: float  # the time limit in seconds, in all or after the last progress
    seconds: float
    stdout: str
    stderr: str

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or an empty string."""
        return "" if self.status is None or self.status >= 0 else signal_name(-self.status)

    @property
    def where(self) -> str:
        """The Python line it was at, from `faulthandler`: `" in File ..."`, or an empty string."""
        written = self.stderr.splitlines()
        for line, following in pairwise(written):
            if line.startswith("Current thread") and following.startswith("  File"):
                return f" in {following.strip()}"
        return ""


def signal_name(number: int) -> str:
    """Return a signal's name; a real-time signal has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def call(module: str, *arguments: str, environ: Mapping[str, str], limit: float) -> Ended:
    """Call `main()` of a module of this package in a child process, for at most `limit` seconds."""
    return run(command(module, *arguments), environ=environ, limit=limit)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main()` of a module of this package, for `run`."""
    isolated = ["-I"] if sys.flags.isolated else []
    calling = [sys.executable, *isolated, "-X", "faulthandler", "-c", _CALL.format(module=module)]
    return [*calling, "\n".join(sys.path), *arguments]


def run(
    program: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit: float,
    folder: Path | None = None,
    progress: Path | None = None,
    on_progress: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a program for at most `limit` seconds, then kill its process group. Ctrl-C kills it, too.

    Whenever the file `progress` has grown, `on_progress` is called, and the child has `limit` seconds more.
    """
    raise_on_signals()
    start = time.perf_counter()
    # Files, not pipes: a process that the child leaves behind would keep a pipe open, and this process waiting.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(  # noqa: S603  # this Python, on a module of this package
            program, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,  # a new process group, which can be killed as a whole
        )  # fmt: skip
        try:
            status = _wait(child, limit, progress, on_progress)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group that has ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.perf_counter() - start
        stdout.seek(0)
        stderr.seek(0)
        texts = (file.read().decode("utf-8", "replace") for file in (stdout, stderr))
        return Ended(status, limit, seconds, *texts)


def _wait(
    child: subprocess.Popen[bytes], limit: float, progress: Path | None, on_progress: Callable[[], None]
) -> int | None:
    size, since = -1, time.monotonic()
    while True:
        left = since + limit - time.monotonic()
        try:
            return child.wait(left if progress is None else min(left, _LOOK))
        except subprocess.TimeoutExpired:
            if progress is not None and progress.stat().st_size != size:
                size, since = progress.stat().st_size, time.monotonic()
                on_progress()
            elif time.monotonic() - since >= limit:
                return None


def raise_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does. By default they end this process and not its child."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
