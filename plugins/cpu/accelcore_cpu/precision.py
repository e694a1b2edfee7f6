"""Precision on the CPU: torch's autocast, made fast and honest, and oneDNN's route for fp32 products."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from accelcore.capabilities import Capabilities
from accelcore.precision.table import Treatment
from accelcore.roles.precision import TorchPrecision, Work
from accelcore_cpu import fast_fp32, low
from accelcore_cpu.attention import choose_form

__all__ = ["CpuPrecision"]

logger = logging.getLogger("accelcore")


class CpuPrecision(TorchPrecision):
    """torch's CPU autocast, with kernels of our own where torch's are slow; it says where it is slow all the same."""

    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__("cpu", capabilities, "AutocastCPU", fast_setting=fast_fp32.SETTING)

    def treatments(self) -> Mapping[str, Treatment]:
        return {"mkldnn_rnn_layer": Treatment.LOW, "_grid_sampler_2d_cpu_fallback": Treatment.FP32}

    def autocast(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        context = super().autocast(dtype, enabled=enabled, table=table)
        if enabled:
            self.prepare(dtype or torch.bfloat16)
        return context

    def prepare(self, dtype: torch.dtype) -> None:
        if dtype in (torch.bfloat16, torch.float16):
            choose_form()
            low.prepare(dtype)

    def products(self, *, fast: bool) -> AbstractContextManager[None]:
        if fast:
            choose_form()
            if fast_fp32.format_of_fast() == "fp32" and not fast_fp32.is_quicker():
                fast = False  # as exact, and on this machine quicker
        return super().products(fast=fast)

    def fast_pays(self, work: Work) -> bool:
        return fast_fp32.format_of_fast() != "fp32" or not fast_fp32.is_quicker() or fast_fp32.pays(work)

    def autocast_pays(self, dtype: torch.dtype, work: Work) -> bool:
        return low.pays(dtype, work)
