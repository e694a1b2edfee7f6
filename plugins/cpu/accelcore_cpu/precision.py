"""Precision on the CPU: torch's autocast with quicker kernels, and fp32 products by oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial

import torch
import torch.distributed as dist

from accelcore.devices import Capabilities
from accelcore.errors import logger
from accelcore.precision.o1.table import Treatment
from accelcore.precision.role import TorchPrecision
from accelcore.torch_features import GET_KERNEL
from accelcore_cpu import processor, rounded_products
from accelcore_cpu.attention import replace_attention
from accelcore_cpu.parameter_gradients import replace_parameter_gradients


class CpuPrecision(TorchPrecision):
    """torch's CPU autocast, with kernels of our own where torch's are slow."""

    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__("cpu", capabilities, "AutocastCPU", fast_setting=processor.fast_setting())

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
        if dtype not in (torch.bfloat16, torch.float16):
            return
        _replace_kernels(replace_attention)
        _replace_kernels(replace_parameter_gradients)
        if not self.has_units(dtype):
            if dtype is torch.float16 or processor.lacks_onednn(dtype):
                _replace_kernels(partial(rounded_products.install, dtype))
            warn_without_units(dtype)

    def products(self, *, fast: bool) -> AbstractContextManager[None]:
        if fast:
            _replace_kernels(replace_attention)
        return super().products(fast=fast)

    def has_units(self, dtype: torch.dtype) -> bool:
        return processor.has_units(dtype)


def _replace_kernels(install: Callable[[], None]) -> None:
    if GET_KERNEL.present:
        install()
    else:
        _warn_of_slow_kernels()


@cache
def _warn_of_slow_kernels() -> None:
    _warn(
        "torch %s has no %s: attention and fp16 products use torch's own kernels, which are right and slower, and "
        "gradients of layer norms and embeddings are wrong if they are sums of many rows in low precision",
        torch.__version__, GET_KERNEL,
    )  # fmt: skip


@cache
def warn_without_units(dtype: torch.dtype) -> None:
    """Warn, once in a job, that the CPU has no instructions for a dtype."""
    if dtype is torch.bfloat16:
        effect = 'matrix products are correct but slower than in fp32; use precision="fp32" if speed matters'
    else:
        effect = "products are computed in fp32 and rounded: the results are right, but not faster than in fp32"
        effect += '; this CPU has instructions for "bf16"' if processor.has_units(torch.bfloat16) else ""
    _warn("this CPU has no instructions for %s: %s", str(dtype).removeprefix("torch."), effect)


def _warn(message: str, *values: object) -> None:
    """Log a warning; in a job, on its first rank only."""
    if not (dist.is_initialized() and dist.get_rank()):
        logger.warning(message, *values)
