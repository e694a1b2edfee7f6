"""The real torch_npu on a machine with no NPU: an emulated CANN on host memory.

It proves wiring and semantics, not device numerics or speed. All its reports contain "EMULATED".

The folder `cann` has the libraries that torch_npu loads, in C++; `kernels` computes for them, in Python; `selftest`
compares both with the CPU. The modules beside them find torch-npu, compile, and start a process.
"""

from __future__ import annotations

from accelcore_npu_emulator import counters
from accelcore_npu_emulator.bootstrap import activate, active, environment
from accelcore_npu_emulator.settings import Fault, Settings

__all__ = ["Fault", "Settings", "activate", "active", "counters", "environment"]
