"""Precision on the NPU: torch's autocast, and HF32 as fast fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch_npu

from accelcore.precision.o1.table import Treatment
from accelcore.precision.role import TorchPrecision


class NpuPrecision(TorchPrecision):
    """Autocast by the operator lists of torch_npu; fp32 by torch_npu's switches, because it ignores torch's."""

    def treatments(self) -> Mapping[str, Treatment]:
        # torch_npu takes these over from torch's autocast for CUDA.
        return dict.fromkeys(("cudnn_convolution", "cudnn_convolution_transpose"), Treatment.LOW)

    def products(self, *, fast: bool) -> AbstractContextManager[None]:
        return _hf32(fast)


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
