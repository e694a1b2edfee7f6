"""The CPU backend: six roles on torch's CPU kernels, oneDNN, gloo and inductor."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from functools import cache

import torch

from accelcore.backend import Backend
from accelcore.capabilities import Capabilities
from accelcore.optim.torch_optimizers import register_torch_optimizers
from accelcore.roles.collectives import TorchCollectives
from accelcore.roles.compiler import TorchCompiler
from accelcore.roles.optimizers import Optimizers, Request
from accelcore.roles.precision import TorchPrecision
from accelcore.roles.scaler import Scalers
from accelcore_cpu.compiler import missing_compiler
from accelcore_cpu.fork import make_fork_safe
from accelcore_cpu.known_faults import LOW_PRECISION_SGD
from accelcore_cpu.runtime import CpuRuntime

__all__ = ["CAPABILITIES", "create"]

logger = logging.getLogger("accelcore")

CAPABILITIES = Capabilities(
    autocast_dtypes=("bfloat16", "float16"),
    model_dtypes=("float32", "float64", "bfloat16", "float16"),
    native_optimizers=("adagrad", "adam", "adamw", "sgd"),
    compilers=("inductor",),
    process_groups=("gloo",),
    parallel=("none", "ddp", "combine_ddp"),
)


def create() -> Backend:
    """Compose the CPU backend; from then on, this process can be forked while it trains."""
    make_fork_safe()
    device = torch.device("cpu")
    optimizers = Optimizers()
    register_torch_optimizers(optimizers, fused=CAPABILITIES.native_optimizers)
    optimizers.distrust("sgd", "fused", LOW_PRECISION_SGD, when=_in_low_precision)
    return Backend(
        name="cpu",
        index=0,
        emulated=False,
        capabilities=CAPABILITIES,
        precision=_CpuPrecision("cpu", CAPABILITIES, "AutocastCPU"),
        scaler=Scalers(device),
        optimizers=optimizers,
        collectives=TorchCollectives(device, "gloo"),
        compiler=TorchCompiler(missing_compiler),
        runtime=CpuRuntime(device),
    )


def _in_low_precision(request: Request) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in request.parameters)


class _CpuPrecision(TorchPrecision):
    """torch's CPU autocast, which says once where low precision makes this CPU slower instead of faster."""

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
