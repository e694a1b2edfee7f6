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
_reports = False


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


def report_failure() -> None:
    """Report the error that ends this process, if one does; nothing where it is no rank of `accelcore run`."""
    global _reports
    if LAUNCHER not in os.environ or _reports:
        return
    _reports, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_rank = os.environ.get(LAUNCHER) == str(os.getppid())
        text = "".join(traceback.format_exception(kind, error, trace))
        because = error.failed if isinstance(error, DistributedError) else ()
        now, shown = time.time(), not is_rank or _has_to_show(text, because)
        # Somebody else's hook may have more to do than to show it.
        if shown or before is not sys.__excepthook__:
            before(kind, error, trace)
        if is_rank and isinstance(error, Exception):  # a KeyboardInterrupt is for the launcher, too
            message = f"{kind.__name__}: {str(error).partition(chr(10))[0]}"
            _write(FailureReport(message, now, text, because, shown))

    sys.excepthook = hook


def _has_to_show(text: str, because: tuple[int, ...]) -> bool:
    """Whether no other rank of this host shows the traceback, or the one of what it is due to."""
    with suppress(OSError, KeyError):  # the launcher has ended, or the script has cleared its environment
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
