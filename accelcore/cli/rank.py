"""The program that `accelcore run` has torch's launcher start as each rank: it becomes Python on the script.

Before that it asks Linux to kill this process when the launcher ends. A launcher that ends in order ends its ranks; one
that is killed outright cannot, and they would train on and hold their devices. Elsewhere than on Linux, they do.

It also puts the folder `at_start` first on PYTHONPATH, for what has to be done in the rank before the script begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> NoReturn:
    """The arguments are the launcher's process id, and what follows `python`."""
    launcher, *arguments = sys.argv[1:]
    _end_with(int(launcher))
    at_start = os.path.join(os.path.dirname(os.path.abspath(__file__)), "at_start")
    path = os.pathsep.join(filter(None, (at_start, os.environ.get("PYTHONPATH"))))
    # Unbuffered, as torch's launcher starts Python: what a rank printed is seen even if it is killed.
    os.execve(sys.executable, [sys.executable, "-u", *arguments], {**os.environ, "PYTHONPATH": path})  # noqa: S606


def _end_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    # Not SIGTERM: a script may answer it by saving a checkpoint, which needs the other ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("accelcore: the launcher has ended before its rank began")


if __name__ == "__main__":
    main()
