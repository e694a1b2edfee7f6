"""Fork of a process that computes on the CPU."""

from __future__ import annotations

import atexit
import ctypes
import os
from functools import cache, partial

_SOFT = 1  # omp_pause_soft: threads are given up, settings are kept


@cache
def make_fork_safe() -> None:
    """End OpenMP's threads before each fork of this process from now on; parent and child start new ones.

    torch computes on the threads of its OpenMP runtime. GNU's runtime keeps them for the next product. A forked child
    inherits the record of the threads, but not the threads, and its first parallel product hangs. Other runtimes handle
    a fork themselves.

    Only the threads of the thread that forks are ended, because a child inherits no other thread. It takes less than a
    millisecond. Does nothing if OpenMP is older than version 5.0, which has no such call.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=partial(pause, _SOFT))
        # A child that exits joins a pool of torch's that is gone, by addresses which OpenMP's threads may now have.
        atexit.register(pause, _SOFT)
