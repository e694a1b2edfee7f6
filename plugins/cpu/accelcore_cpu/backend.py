"""The CPU backend: six roles on torch's CPU kernels, oneDNN, gloo and inductor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache

import torch

from accelcore.backend import Backend
from accelcore.capabilities import Capabilities
from accelcore.precision.table import Treatment
from accelcore.roles.collectives import TorchCollectives
from accelcore.roles.compiler import TorchCompiler
from accelcore.roles.precision import TorchPrecision
from accelcore.roles.scaler import Scalers
from accelcore_cpu.compiler import missing_compiler
from accelcore_cpu.fork import make_fork_safe
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.optimizers import NATIVE
from accelcore_cpu.routes import FUSED, create_optimizers
from accelcore_cpu.runtime import CpuRuntime

__all__ = ["create", "declare"]

logger = logging.getLogger("accelcore")


def declare(*, compiler: bool) -> Capabilities:
    """What the CPU can do; `compiler`: there is one to build our kernels with."""
    return Capabilities(
        autocast_dtypes=("bfloat16", "float16"),
        autocast_tables=("torch", "O1"),
        model_dtypes=("float32", "float64", "bfloat16", "float16"),
        native_optimizers=tuple(sorted({*FUSED, *(NATIVE if compiler else ())})),
        compilers=("inductor",),
        process_groups=("gloo",),
        parallel=("none", "ddp", "combine_ddp"),
    )


def create() -> Backend:
    """Compose the CPU backend; from then on, this process can be forked while it trains."""
    make_fork_safe()
    device = torch.device("cpu")
    capabilities = declare(compiler=unavailable(build=False) is None)
    return Backend(
        name="cpu",
        index=0,
        emulated=False,
        capabilities=capabilities,
        precision=_CpuPrecision("cpu", capabilities, "AutocastCPU"),
        scaler=Scalers(device),
        optimizers=create_optimizers(),
        collectives=TorchCollectives(device, "gloo"),
        compiler=TorchCompiler(missing_compiler),
        runtime=CpuRuntime(device),
    )


class _CpuPrecision(TorchPrecision):
    """torch's CPU autocast, which says once where low precision makes this CPU slower instead of faster."""

    def treatments(self) -> Mapping[str, Treatment]:
        return {"mkldnn_rnn_layer": Treatment.LOW, "_grid_sampler_2d_cpu_fallback": Treatment.FP32}

    def autocast(
        self, dtype: torch.dtype | None = None, *, enabled: bool = True, table: str = "torch"
    ) -> AbstractContextManager[object]:
        context = super().autocast(dtype, enabled=enabled, table=table)
        if enabled:
            _warn_if_slow(dtype or torch.bfloat16)
        return context


@cache
def _warn_if_slow(dtype: torch.dtype) -> None:
    fast = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }[dtype]
    if not fast():
        short = str(dtype).removeprefix("torch.")
        logger.warning("oneDNN has no %s kernels for this CPU: autocast to it is right, but slower than fp32", short)
