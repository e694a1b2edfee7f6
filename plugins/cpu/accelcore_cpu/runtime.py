"""Runtime of the CPU, whose memory is that of the process."""

from __future__ import annotations

import resource
import sys

import psutil

from accelcore.roles.runtime import Memory, TorchRuntime

__all__ = ["CpuRuntime"]


class CpuRuntime(TorchRuntime):
    """The host as a device: there is nothing to synchronize, and one source of random numbers."""

    def synchronize(self) -> None:
        pass  # operators return when they are done

    def memory(self) -> Memory:
        """Return the resident memory of this process, its peak, and the machine's total."""
        unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        used = psutil.Process().memory_info().rss
        return Memory(used=used, peak=max(peak, used), total=psutil.virtual_memory().total)
