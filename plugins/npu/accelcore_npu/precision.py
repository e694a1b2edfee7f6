"""Precision on the NPU: torch's autocast, and HF32 as fast fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch_npu

from accelcore.errors import UnsupportedError
from accelcore.precision.table import Treatment
from accelcore.roles.precision import TorchPrecision

__all__ = ["NpuPrecision"]


class NpuPrecision(TorchPrecision):
    """Autocast by the operator lists of torch_npu; fp32 by its switches, because it does not read torch's."""

    def treatments(self) -> Mapping[str, Treatment]:
        # torch_npu takes the list of torch's autocast for CUDA over, with these.
        return dict.fromkeys(("cudnn_convolution", "cudnn_convolution_transpose"), Treatment.LOW)

    def fp32(self, mode: str) -> AbstractContextManager[None]:
        known = ("ieee", "fast") if self._capabilities.fast_fp32 else ("ieee",)
        if mode not in known:
            raise UnsupportedError(
                f"fp32={mode!r} is not available on this npu",
                available=", ".join(known),
                remedy="leave fp32 out to keep torch_npu's own setting, which is HF32 for convolutions alone",
            )
        return _hf32(mode == "fast")


@contextmanager
def _hf32(allowed: bool) -> Iterator[None]:
    switches = (torch_npu.npu.matmul, torch_npu.npu.conv)
    before = [switch.allow_hf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_hf32 = allowed
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_hf32 = value
