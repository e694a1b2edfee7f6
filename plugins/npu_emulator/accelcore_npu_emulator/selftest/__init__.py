"""The emulator against the CPU: torch's own operator samples, on both.

`python -m accelcore_npu_emulator.selftest` compares every operator of torch's in fp32, fp16 and bf16, forward and
backward, in place and with `out=`, prints what it found, and exits with 1 where too little agrees. The samples are
torch's (`torch.testing`), and need the package `expecttest`.

What is random is found by asking the CPU again, with another seed: where its own answers differ, only shape, dtype,
strides and device are compared. What torch_npu hands back to the CPU, because it has no kernel for it, agrees without
proving anything of the emulator, and is counted by itself.
"""

from __future__ import annotations

from accelcore_npu_emulator.selftest.report import Report
from accelcore_npu_emulator.selftest.sweep import sweep

__all__ = ["Report", "sweep"]
