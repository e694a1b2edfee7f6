"""The real torch_npu on a machine with no NPU: an emulated CANN on host memory.

It proves wiring and semantics, not device numerics or speed. All its reports contain "EMULATED".
"""

from __future__ import annotations

from accelcore_npu_emulator import counters
from accelcore_npu_emulator.bootstrap import activate, active, environment
from accelcore_npu_emulator.settings import Fault, Settings

__all__ = ["Fault", "Settings", "activate", "active", "counters", "environment"]
