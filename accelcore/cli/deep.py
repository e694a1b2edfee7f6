"""`accelcore doctor --deep`: `import torch` and every usable backend, each tried in a child process with a time limit.

The child (`trial.py`) may crash, hang or raise; here is what that is called, and what to do about it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from accelcore.cli import trial
from accelcore.cli.autoload import VARIABLE, Autoload, enabled
from accelcore.cli.diagnosis import Deep, Trial

__all__ = ["examine"]

_KEPT = 30  # lines of a child's stderr
_LONGEST = 300  # characters of its last line that are shown
# A job's variables would make a rank of the child; what is tried is the backend, not the job.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def examine(installed: Sequence[str], usable: Sequence[str], found: Sequence[Autoload], timeout: float) -> Deep:
    """Try torch, then each usable backend, for `timeout` seconds each; the others are listed as not tried."""
    environ = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    torch = _try(None, environ, timeout)
    autoload_broken = False
    if torch.outcome != "works" and found and enabled(environ):
        without = {**environ, VARIABLE: "0"}
        if _try(None, without, timeout).outcome == "works":
            torch, autoload_broken, environ = _blamed_on_autoload(torch, found), True, without
    backends = []
    for name in installed:
        if name not in usable:
            backends.append(Trial(name, "not tried", reason="it is not usable here"))
        elif torch.outcome != "works" and not autoload_broken:
            backends.append(Trial(name, "not tried", reason="torch cannot be imported"))
        else:
            backends.append(_try(name, environ, timeout))
    return Deep(torch, autoload_broken, tuple(backends))


def _blamed_on_autoload(trial: Trial, found: Sequence[Autoload]) -> Trial:
    points = "; ".join(map(str, found))
    owners = ", ".join(sorted({autoload.distribution for autoload in found}))
    return Trial(
        trial.name,
        trial.outcome,
        reason=f"torch itself is sound: import torch works with {VARIABLE}=0, and not without it, because torch's "
        f"backend autoload calls {points} ({trial.reason})",
        remedy=f"set {VARIABLE}=0, start scripts with accelcore run, or repair or uninstall {owners}",
        seconds=trial.seconds,
        stderr=trial.stderr,
    )


def _try(name: str | None, environ: Mapping[str, str], timeout: float) -> Trial:
    label = "torch" if name is None else name
    command = [sys.executable, "-X", "faulthandler", "-m", trial.__name__, *([] if name is None else [name])]
    start = time.perf_counter()
    # A file, not a pipe: a process that the child leaves behind would keep a pipe open, and this one waiting.
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(  # noqa: S603  # this Python, on a module of this package
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
            start_new_session=True,  # a group of its own, which can be ended whole
        )  # fmt: skip
        try:
            status: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        seconds = time.perf_counter() - start
        stderr.seek(0)
        written = stderr.read().decode("utf-8", "replace").splitlines()
    outcome, reason, remedy = _judge(status, [line for line in written if line.strip()], timeout)
    return Trial(
        label, outcome, reason, remedy, round(seconds, 3), () if outcome == "works" else tuple(written[-_KEPT:])
    )


def _judge(status: int | None, written: Sequence[str], timeout: float) -> tuple[str, str, str]:
    said = [line.removeprefix(trial.SAYS) for line in written if line.startswith(trial.SAYS)]
    if status == 0 and said[-1:] == [trial.WORKS]:
        return "works", "", ""
    if status is None:
        reason = f"it did not end within {timeout:g} seconds, and was killed"
        return "hung", reason, "give it longer with --timeout, or see what its driver says"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-status}"
        where = _where(written)
        if name == "SIGKILL":
            return "crashed", f"SIGKILL ended it{where}", "see whether the machine ran out of memory"
        remedy = "install versions that fit together; the last lines it wrote are in --json"
        return "crashed", f"{name} ended it{where}", remedy
    last = (said or written)[-1:]
    reason = last[0].strip()[:_LONGEST] if last else f"it exited with {status} and wrote nothing"
    return "failed", reason, _remedy(reason)


def _where(written: Sequence[str]) -> str:
    """The innermost Python frame, from the dump that `faulthandler` leaves."""
    for number, line in enumerate(written):
        if "most recent call first" in line and number + 1 < len(written):
            return f" in {written[number + 1].strip()}"
    return ""


def _remedy(reason: str) -> str:
    if "undefined symbol" in reason:
        return "it is built for another version of what it links to: install versions that fit together"
    if "cannot open shared object file" in reason:
        return "a library is missing: install the vendor's runtime, or set up its environment"
    if "No module named" in reason:
        return "install what is missing"
    return "the traceback is in the stderr of --json"
