"""What becomes of the error that ends a rank of `accelcore run`: it is shown once a host, and told to the launcher.

One error often ends all ranks alike, and a rank that fails ends others that wait for it. So of ranks that fail alike
the first shows its traceback, and one that fails because another of its host has failed shows none. In the end the
launcher says which rank it was, and shows a traceback that nobody has shown.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from accelcore.causes import causes
from accelcore.errors import DistributedError

__all__ = ["LAUNCHER", "FailureReport", "report_failure"]

LAUNCHER = "ACCEL_LAUNCHER"
"""The variable in which `accelcore run` leaves its process id: its ranks report, and what they start does not."""

_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's launcher has one for each rank, and reads it when the rank has ended
_done: set[str] = set()


@dataclass(frozen=True)
class FailureReport:
    """The error that ended a rank, in the form in which torch's launcher expects it.

    Attributes:
        message: its class and first line.
        timestamp: when, in seconds since the epoch.
        traceback: as Python shows it.
        because: the ranks whose failures it is due to.
        shown: whether this rank has shown the traceback.
    """

    message: str
    timestamp: float
    traceback: str
    because: tuple[int, ...]
    shown: bool

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> FailureReport | None:
        """The report in the file of a rank; None where it is another's, such as that of torch's `record`."""
        if "because" not in saved:
            return None
        return cls(**{**saved, "because": tuple(saved["because"])})


class _Hook:
    """What Python calls with the error that ends this process, in place of the hook that was there before."""

    _judged: BaseException | None = None
    _report: FailureReport

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(LAUNCHER) != str(os.getppid()):  # what a rank has started
            self._before(kind, error, trace)
            return
        first = _Hook._judged is not error  # else another of these stands before it, and calls this one
        if first:
            _Hook._judged, _Hook._report = error, _report_of(kind, error, trace)
        # Somebody else's hook may have more to do than to show it.
        if _Hook._report.shown or self._before is not sys.__excepthook__:
            self._before(kind, error, trace)
        if first and isinstance(error, Exception):  # a KeyboardInterrupt is for the launcher, too
            _write(_Hook._report)


def report_failure(at: Literal["start", "select"]) -> None:
    """Report the error that ends this process, if one does; nothing where it is no rank of `accelcore run`.

    Args:
        at: when the process starts, or when its script first selects a backend: it may have replaced the hook in
            between. Each is done once, for what is put around the hook later may turn one error into another.
    """
    if LAUNCHER not in os.environ or at in _done:
        return
    _done.add(at)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def _report_of(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> FailureReport:
    text = "".join(traceback.format_exception(kind, error, trace))
    message = f"{kind.__name__}: {str(error).partition(chr(10))[0]}"
    failed = (cause.failed for cause in causes(error) if isinstance(cause, DistributedError))
    because = next(filter(None, failed), ())
    return FailureReport(message, time.time(), text, because, _has_to_show(text, because))


def _has_to_show(text: str, because: tuple[int, ...]) -> bool:
    """Whether no other rank of this host shows the traceback, or the one of what it is due to."""
    with suppress(OSError, KeyError, ValueError):  # the launcher has ended, or the script has cleared its environment
        rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        first = rank - local_rank
        if because and all(first <= other < first + size for other in because):
            return False
        # In a folder of this start of this host's ranks.
        sign = Path(os.environ[_FILE]).parents[1] / hashlib.sha256(text.encode(errors="replace")).hexdigest()
        try:
            sign.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _write(report: FailureReport) -> None:
    with suppress(OSError, KeyError):
        file = Path(os.environ[_FILE])
        written = file.with_suffix(".new")
        written.write_text(json.dumps(asdict(report)), encoding="utf-8")
        written.replace(file)  # the launcher reads a whole one or none
