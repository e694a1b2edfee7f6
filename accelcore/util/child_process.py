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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

_CALL = "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from {module} import main; sys.exit(main())"

_LOOK = 0.2  # seconds between looks at a child

T = TypeVar("T")


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
    def fate(self) -> str:
        """Verb of a sentence that tells its end; after a crash with the Python line, if `faulthandler` wrote it."""
        if self.status is None:
            return f"did not end within {self.limit:g} seconds, and was killed"
        if not self.signal:
            return f"ended with exit code {self.status}"
        written = pairwise(self.stderr.splitlines())
        places = (line for head, line in written if head.startswith("Current thread") and line.startswith("  File"))
        return f"was ended by {self.signal}" + next((f" in {line.strip()}" for line in places), "")


def signal_name(number: int) -> str:
    """Return a signal's name; a real-time signal has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls `main()` of a module of this package."""
    isolated = ["-I"] if sys.flags.isolated else []
    calling = [sys.executable, *isolated, "-X", "faulthandler", "-c", _CALL.format(module=module)]
    return [*calling, "\n".join(sys.path), *arguments]


def call(module: str, *arguments: str, environ: Mapping[str, str], limit: float, progress: Path | None = None) -> Ended:
    """Call `main()` of a module of this package in a child process, for `limit` seconds as `watch` counts them."""
    (ended,) = run_together([watch(command(module, *arguments), environ=environ, limit=limit, progress=progress)])
    return ended


def run_together(watched: Sequence[Generator[None, None, T]], on_look: Callable[[], None] = lambda: None) -> list[T]:
    """Run generators like `watch` in turn, and `on_look` after each turn; return what the generators return.

    If one raises, and at Ctrl-C, all of them are closed.
    """
    raise_on_signals()
    returned: dict[int, T] = {}
    with ExitStack() as stack:
        for generator in watched:
            stack.enter_context(closing(generator))
        while len(returned) < len(watched):
            for number, generator in enumerate(watched):
                if number not in returned:
                    try:
                        next(generator)
                    except StopIteration as end:
                        returned[number] = end.value
            on_look()
    return [returned[number] for number in range(len(watched))]


def watch(
    program: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit: float,
    folder: Path | None = None,
    progress: Path | None = None,
) -> Generator[None, None, Ended]:
    """Start a program, and yield a few times a second until it ends; then, or if closed, kill its process group.

    Whenever the file `progress` has grown, the child has `limit` seconds more.
    """
    start = time.perf_counter()
    # Files, not pipes: a process that the child leaves behind would keep a pipe open, and this process waiting.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(  # noqa: S603  # this Python, on a module of this package
            program, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            start_new_session=True,  # a new process group, which can be killed as a whole
        )  # fmt: skip
        status, size, since = None, 0, time.monotonic()
        try:
            while (left := since + limit - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    status = child.wait(min(left, _LOOK))
                    break
                if progress is not None and progress.stat().st_size != size:
                    size, since = progress.stat().st_size, time.monotonic()
                yield
        finally:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group that has ended
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.perf_counter() - start
        stdout.seek(0)
        stderr.seek(0)
        texts = (file.read().decode("utf-8", "replace") for file in (stdout, stderr))
        return Ended(status, limit, seconds, *texts)


def raise_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does. By default they end this process and not its child."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
