"""Comparison of the emulator with the CPU on torch's operator samples.

`python -m accelcore_npu_emulator.selftest` compares every operator of torch in fp32, fp16 and bf16: forward, backward,
in place and with `out=`. It prints a report, and exits with 1 if too few results agree. The samples come from
`torch.testing`, and need the package `expecttest`.

Random results are found by a second run on the CPU with another seed. If the CPU's results differ, only shape, dtype,
strides and device are compared. Operators that torch_npu computes on the CPU prove nothing, and are counted apart.
"""

from __future__ import annotations

from accelcore_npu_emulator.selftest.report import Report
from accelcore_npu_emulator.selftest.sweep import sweep

__all__ = ["Report", "sweep"]
