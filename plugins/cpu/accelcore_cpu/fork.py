"""The CPU and fork: OpenMP's threads do not survive it, and the child waits for them for ever.

torch computes on the threads of the OpenMP runtime that it brings. GNU's keeps them for the next product, and a forked
child inherits its record of them, but not the threads: the child's first product that takes several hangs. Other
runtimes see to a fork themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import cache, partial

__all__ = ["make_fork_safe"]

_SOFT = 1  # omp_pause_soft: threads are given up, settings are kept


@cache
def make_fork_safe() -> None:
    """From now on, give up OpenMP's threads before each fork of this process; both sides start new ones when needed.

    They are those of the thread that forks, the only thread that a child inherits. This takes less than a millisecond
    a fork. Does nothing where OpenMP is older than version 5.0, which brought the call.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=partial(pause, _SOFT))
        # A child that exits joins a pool of torch's that is gone, by addresses which OpenMP's threads may now have.
        atexit.register(pause, _SOFT)
