"""Run one test file in processes that are held within limits, and killed whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Limits", "Outcome", "run_file"]

_HERE = Path(__file__).parent
_MARK = "VENDOR_SUITE_RECORD"  # in the environment of every process of a file: its value is the file's own
_POLL = 0.5


@dataclass(frozen=True)
class Limits:
    """What a test file may take.

    Attributes:
        test_seconds: one test.
        file_seconds: the whole file; what has not started then is not counted.
        process_bytes: address space of one process.
        total_bytes: resident memory of all processes of the file together.
        processes: how many there may be at once.
    """

    test_seconds: float = 120
    file_seconds: float = 600
    process_bytes: int = 24 * 2**30
    total_bytes: int = 10 * 2**30
    processes: int = 40


@dataclass(frozen=True)
class Outcome:
    """How one test ended: `"passed"`, `"skipped"`, `"failed"`, `"died"` or `"limit"`, and what it said."""

    test: str
    outcome: str
    text: str = ""


def run_file(file: str, suite: Path, environ: Mapping[str, str], limits: Limits) -> list[Outcome]:
    """Run the tests of a file of the suite; after a death or a limit, the rest of them in a new process."""
    with tempfile.TemporaryDirectory(prefix="vendor-suite-") as folder:
        record = Path(folder) / "record"
        ended: dict[str, Outcome] = {}
        end = time.monotonic() + limits.file_seconds
        while True:
            reason = _run(file, suite, {**environ, _MARK: str(record), "TMPDIR": folder}, limits, record, end)
            blamed = _read(record, ended)
            if not reason:
                break
            kind = "died" if reason.startswith("died") else "limit"
            name = blamed or file
            if name in ended:
                break
            ended[name] = Outcome(name, kind, reason)
            with record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"end": name, "outcome": kind, "text": reason}) + "\n")
            if not blamed or time.monotonic() > end:
                break
        return list(ended.values())


def _run(file: str, suite: Path, environ: dict[str, str], limits: Limits, record: Path, end: float) -> str:
    """Run once; why it ended before its time, or nothing."""
    options = ["-p", "recorder", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(suite), "-q"]
    pytest = [sys.executable, "-m", "pytest", *options, "--continue-on-collection-errors", file]
    limited = [sys.executable, str(_HERE / "limited.py"), str(limits.process_bytes), *pytest]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(  # noqa: S603  # this Python, no shell
            limited, cwd=suite, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            reason = _watch(child, limits, record, end)
        finally:
            _kill(record)
            child.wait()
        if reason or child.returncode in (0, 1, 5):  # pytest's: passed, failed, nothing to run
            return reason
        said.seek(0)
        tail = said.read()[-3000:].decode(errors="replace")
        name = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
        return f"died: {name}\n{tail}"


def _watch(child: subprocess.Popen[bytes], limits: Limits, record: Path, end: float) -> str:
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_POLL)
            return ""
        now = time.monotonic()
        if now > end:
            return f"limit: the file took more than {limits.file_seconds:g} seconds"
        if _running(record) > limits.test_seconds:
            return f"limit: it took more than {limits.test_seconds:g} seconds"
        ours = list(_processes(record))
        if len(ours) > limits.processes:
            return f"limit: it started more than {limits.processes} processes"
        total = 0
        for process in ours:
            with suppress(psutil.Error):
                total += process.memory_info().rss
        if total > limits.total_bytes:
            return f"limit: it took more than {limits.total_bytes / 2**30:g} GiB"


def _running(record: Path) -> float:
    """For how many seconds a test has been running; 0 where none is."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    return time.time() - record.stat().st_mtime if lines and "start" in json.loads(lines[-1]) else 0.0


def _processes(record: Path) -> Iterator[psutil.Process]:
    """All processes of the file, also those that left its session or lost their parents."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == str(record):
                yield process


def _kill(record: Path) -> None:
    while ours := list(_processes(record)):
        for process in ours:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(ours, timeout=1)


def _read(record: Path, ended: dict[str, Outcome]) -> str:
    """Add what has ended; the test that has only started, or nothing."""
    started = ""
    for line in record.read_text(encoding="utf-8").splitlines() if record.exists() else ():
        entry = json.loads(line)
        if "start" in entry:
            started = entry["start"]
        else:
            ended[entry["end"]] = Outcome(entry["end"], entry["outcome"], entry["text"])
    return "" if started in ended else started
