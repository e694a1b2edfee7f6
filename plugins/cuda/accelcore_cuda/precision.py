"""Precision on CUDA: torch's autocast, and TF32 as fast fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch

from accelcore.devices import Capabilities
from accelcore.errors import logger
from accelcore.precision.o1.table import Treatment
from accelcore.precision.role import TorchPrecision


class CudaPrecision(TorchPrecision):
    """Autocast by torch's lists; fp32 by torch's two legacy switches, for matrix products and for cuDNN.

    cuDNN's switch is on by default: without `fp32="ieee"` convolutions use TF32 if the GPU has it.
    """

    def __init__(self, capabilities: Capabilities, *, emulated_bfloat16: bool) -> None:
        super().__init__("cuda", capabilities, "AutocastCUDA")
        self._emulated_bfloat16 = emulated_bfloat16

    def autocast(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        context = super().autocast(dtype, enabled=enabled, table=table)
        if enabled and dtype is torch.bfloat16 and self._emulated_bfloat16:
            _warn_of_emulation()
        return context

    def treatments(self) -> Mapping[str, Treatment]:
        return dict.fromkeys(("_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose"), Treatment.LOW)

    def products(self, *, fast: bool) -> AbstractContextManager[None]:
        matrices = super().products(fast=fast)
        _ = torch.backends.cudnn.allow_tf32  # raises now if it could not be restored later
        return _with_convolutions(matrices, fast)


@contextmanager
def _with_convolutions(matrices: AbstractContextManager[None], fast: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    try:
        with matrices:
            torch.backends.cudnn.allow_tf32 = fast
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@cache
def _warn_of_emulation() -> None:
    logger.warning(
        "this GPU has no bf16 units: torch computes bf16 in fp32 and rounds, which is correct but slower than fp16"
    )
