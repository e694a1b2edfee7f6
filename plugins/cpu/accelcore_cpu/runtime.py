"""The CPU as a device: its memory is the process's."""

from __future__ import annotations

import resource
import sys

import psutil

from accelcore.roles.runtime import Memory, TorchRuntime

__all__ = ["CpuRuntime"]


class CpuRuntime(TorchRuntime):
    """The host: nothing to synchronize, one source of random numbers."""

    def synchronize(self) -> None:
        pass  # operators return when they are done

    def memory(self) -> Memory:
        """Resident memory of this process, the most it ever was, and the machine's."""
        unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        used = psutil.Process().memory_info().rss
        return Memory(used=used, peak=max(peak, used), total=psutil.virtual_memory().total)
