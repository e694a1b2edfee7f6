"""What becomes of the error that ends a rank of `accelcore run`: it is shown once a host, and told to the launcher.

One error often ends all ranks alike, and a rank that fails ends others that wait for it. So of ranks that fail alike
the first shows its traceback, and one that fails because another of its host has failed shows none: a sentence of the
launcher's says what became of which rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from accelcore.errors import DistributedError

__all__ = ["LAUNCHER", "FailureReport", "report_failure"]

LAUNCHER = "ACCEL_LAUNCHER"
"""The variable in which `accelcore run` leaves its process id: its ranks report, and what they start does not."""

_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's launcher has one for each rank, and reads it when the rank has ended


@dataclass(frozen=True)
class FailureReport:
    """The error that ended a rank, in the form in which torch's launcher expects it.

    Attributes:
        message: its class and first line.
        timestamp: when, in seconds since the epoch.
        alike: equal for ranks that have the same traceback.
        because: the ranks whose failures it is due to.
    """

    message: str
    timestamp: float
    alike: str
    because: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> FailureReport:
        """The report of an error that nobody caught."""
        text = "".join(traceback.format_exception(error))
        lines = str(error).splitlines()
        return cls(
            message=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__,
            timestamp=time.time(),
            alike=hashlib.sha256(text.encode(errors="replace")).hexdigest(),
            because=error.failed if isinstance(error, DistributedError) else (),
        )

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> FailureReport | None:
        """The report in the file of a rank; None where it is another's, such as that of torch's `record`."""
        if "alike" not in saved:
            return None
        return cls(**{**saved, "because": tuple(saved["because"])})


def report_failure() -> None:
    """Do so with the error that ends this process; nothing where it is no rank of `accelcore run`."""
    if LAUNCHER not in os.environ or getattr(sys.excepthook, "reports", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = True
        if os.environ[LAUNCHER] == str(os.getppid()) and isinstance(error, Exception):
            with suppress(OSError, KeyError):  # the launcher has ended; or this process has lost its environment
                shown = _report(error)
        # Somebody else's hook may have more to do than to show it.
        if shown or before is not sys.__excepthook__:
            before(kind, error, trace)

    hook.reports = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _report(error: Exception) -> bool:
    """Leave the report; whether this rank is the one that shows the traceback."""
    report, file = FailureReport.of(error), Path(os.environ[_FILE])
    written = file.with_suffix(".new")
    written.write_text(json.dumps(asdict(report)), encoding="utf-8")
    written.replace(file)  # the launcher reads a whole one or none
    rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    here = range(rank - local_rank, rank - local_rank + size)
    if report.because and all(other in here for other in report.because):
        return False
    try:
        (file.parents[1] / report.alike).touch(exist_ok=False)  # in a folder of this start of this host's ranks
    except FileExistsError:
        return False
    return True
