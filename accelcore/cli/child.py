"""A child process that runs one module of this package, followed to its end: it may crash, exit, hang, leave others.

It sees the same packages as this process, in the same order, and no more: the working directory, which `python -m`
would put first, could hold a file with a package's name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import IO

__all__ = ["Ended", "call", "exceptions_for_signals"]

_CALL = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from {module} import main; sys.exit(main())"


@dataclass(frozen=True)
class Ended:
    """How a child process ended, and what it wrote.

    Attributes:
        status: its exit code; below 0 the signal that ended it; None where it did not end in time, and was killed.
        limit: how many seconds it was given.
        seconds: how many it took.
    """

    status: int | None
    limit: float
    seconds: float
    stdout: str
    stderr: str

    @property
    def signal(self) -> str:
        """The name of the signal that ended it; empty where none did."""
        if self.status is None or self.status >= 0:
            return ""
        try:
            return signal.Signals(-self.status).name
        except ValueError:  # a real-time signal has no name
            return f"signal {-self.status}"

    @property
    def where(self) -> str:
        """The Python line it was at, from the dump that `faulthandler` leaves: `" in File ..."`, or empty."""
        written = self.stderr.splitlines()
        for line, following in pairwise(written):
            if line.startswith("Current thread") and following.startswith("  File"):
                return f" in {following.strip()}"
        return ""


def call(module: str, *arguments: str, environ: Mapping[str, str], limit: float) -> Ended:
    """Call `main()` of a module of this package in a Python of its own, for at most `limit` seconds.

    However this ends, by Ctrl-C too, the child is gone, with all that it started in its process group.
    """
    isolated = ["-I"] if sys.flags.isolated else []
    command = [sys.executable, *isolated, "-X", "faulthandler", "-c", _CALL.format(module=module)]
    start = time.perf_counter()
    # Files, not pipes: a process that the child leaves behind would keep a pipe open, and this one waiting.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, exceptions_for_signals():
        child = subprocess.Popen(  # noqa: S603  # this Python, on a module of this package
            [*command, "\n".join(sys.path), *arguments],
            env=environ, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,  # a group of its own, which can be ended whole
        )  # fmt: skip
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = child.wait(limit)
        finally:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group that has ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return Ended(status, limit, time.perf_counter() - start, _text(stdout), _text(stderr))


@contextmanager
def exceptions_for_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does: by default they end this process and leave its child."""
    replaced = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
