"""Runtime of the CPU, whose memory is that of the process, and fork of a process that computes on it."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import sys
from functools import cache, partial

import psutil

from accelcore.roles.runtime import Memory, TorchRuntime

__all__ = ["CpuRuntime", "make_fork_safe"]

_SOFT = 1  # omp_pause_soft: threads are given up, settings are kept


class CpuRuntime(TorchRuntime):
    """The host as a device: there is nothing to synchronize, and one source of random numbers."""

    def synchronize(self) -> None:
        pass  # operators return when they are done

    def memory(self) -> Memory:
        """Return the resident memory of this process, its peak, and the machine's total."""
        unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        used = _process(os.getpid()).memory_info().rss
        return Memory(used=used, peak=max(peak, used), total=_total())


_process = cache(psutil.Process)
"""Makes the object of a process once: that takes longer than reading its memory."""


@cache
def _total() -> int:
    total: int = psutil.virtual_memory().total
    return total


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
