"""What `accelcore run` says of ranks that have failed: which came first, how it ended, and what can be done."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from accelcore.failure_report import FailureReport
from accelcore.roles.notes import ranks

__all__ = ["Failure", "said_of"]

_LONGEST = 300  # characters of an error's first line

_ENDED = "see what it wrote, above; if that is nothing, look for what ends a process: sys.exit, os._exit, a library"
_UNCAUGHT = 1  # Python's exit code; a rank that was slow to leave has that of the signal which the launcher sent it
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})


@dataclass(frozen=True)
class Failure:
    """How a rank ended.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        noticed: when the launcher saw that, in seconds since the epoch.
        report: what the rank said of its error; None where it could not, or made no use of accelcore.
    """

    code: int
    noticed: float
    report: FailureReport | None = None


def said_of(failures: Mapping[int, Failure]) -> tuple[str, int]:
    """A text for the user, and the exit code of the whole: that of the rank that failed first.

    Args:
        failures: by rank, in the order in which the launcher noticed them; with those that it ended itself.
    """
    rank = min(failures, key=lambda rank: _place(failures[rank]))
    first = failures[rank]
    if first.report is None:
        if first.code >= 0:
            return _text(f"rank {rank} ended with exit code {first.code}", _ENDED), first.code
        return _text(f"rank {rank} was ended by {_name(-first.code)}", _remedy(-first.code)), 128 - first.code
    reports = {other: failure.report for other, failure in failures.items() if failure.report is not None}
    alike = {other: report for other, report in reports.items() if report.traceback == first.report.traceback}
    code = max(first.code, _UNCAUGHT)
    failed = f"{ranks(alike)} failed{' alike' if len(alike) > 1 else ''} with exit code {code}"
    shown = "" if any(report.shown for report in alike.values()) else first.report.traceback
    return shown + _text(f"{failed}: {first.report.message[:_LONGEST]}", "see the traceback above"), code


def _place(failure: Failure) -> tuple[bool, float]:
    """Those who failed by themselves come first, and of them the earliest."""
    if failure.report is not None:
        return bool(failure.report.because), failure.report.timestamp
    # The launcher ends the others so; where it ended nobody, the order decides.
    return failure.code == -signal.SIGTERM, failure.noticed


def _text(why: str, remedy: str) -> str:
    return f"accelcore: the job ended because {why}\n  what to do: {remedy}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _remedy(number: int) -> str:
    if number == signal.SIGKILL:
        return "see whether memory ran out, in the system's log or the container's"
    if number in _CRASHES:
        return "set PYTHONFAULTHANDLER=1, and the rank shows where it was"
    return "see what it wrote, above, and who sent that"
