"""The NPU backend: six roles on torch_npu. Only this module and its own imports import torch_npu."""

from __future__ import annotations

import sys
from functools import partial

import torch

from accelcore.backend import Backend
from accelcore.devices import Capabilities
from accelcore.devices.plugins import describe_error
from accelcore.errors import BackendUnavailableError, logger
from accelcore.scaling.dynamic import Scalers
from accelcore_npu.detection import emulated_devices


def create(index: int) -> Backend:
    """Compose the backend of one NPU."""
    late = "torch_npu" not in sys.modules
    _import_runtime()

    from accelcore_npu.collectives import NpuCollectives
    from accelcore_npu.compiler import NpuCompiler
    from accelcore_npu.fallback import apply_setting
    from accelcore_npu.optimizers import create_optimizers
    from accelcore_npu.precision import NpuPrecision
    from accelcore_npu.runtime import NpuRuntime
    from accelcore_npu.scaler import FlagScaler, NpuScaler

    apply_setting()
    device = torch.device("npu", index)
    runtime = NpuRuntime(device)
    if late:
        _check_autograd(device)
    capabilities = _capabilities()
    collectives, saturates = NpuCollectives(device), capabilities.overflow_flag
    logger.info("npu:%d: %s", index, ", ".join(f"{name}={value}" for name, value in runtime.settings.items()))
    return Backend(
        name="npu",
        index=index,
        emulated=emulated_devices() is not None,
        capabilities=capabilities,
        precision=NpuPrecision("npu", capabilities, "AutocastPrivateUse1"),
        scaler=Scalers(device, partial(FlagScaler, collectives=collectives) if saturates else NpuScaler),
        optimizers=create_optimizers(),
        collectives=collectives,
        compiler=NpuCompiler(device),
        runtime=runtime,
    )


def _import_runtime() -> None:
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        raise BackendUnavailableError(
            "torch_npu cannot be imported",
            why=describe_error(error),
            remedy="run accelcore doctor --deep, and install versions of torch, torch-npu and CANN that fit together",
        ) from error


def _check_autograd(device: torch.device) -> None:
    """Refuse a process whose autograd engine started, and counted its devices, before torch_npu was loaded."""
    try:
        torch.ones((), device=device, requires_grad=True).backward()
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"{device} cannot be used in this process",
            why="a backward pass ran before torch_npu was loaded, and torch's autograd engine counts devices only once",
            remedy="call accelcore.select(), or import torch_npu, before the first backward pass",
        ) from error


def _capabilities() -> Capabilities:
    import torch_npu

    from accelcore_npu.compiler import installed_compilers
    from accelcore_npu.optimizers import FUSED

    # Chips before Ascend910B clamp overflow and raise a flag. They have neither bf16 nor HF32.
    saturates = not torch_npu.npu.utils.is_support_inf_nan()
    bf16 = torch_npu.npu.is_bf16_supported()
    return Capabilities(
        autocast_dtypes=("bfloat16", "float16") if bf16 else ("float16",),
        autocast_tables=("torch", "O1"),
        model_dtypes=("float32", "bfloat16", "float16") if bf16 else ("float32", "float16"),
        fast_fp32=None if saturates else "hf32",
        native_optimizers=tuple(sorted(FUSED)),
        compilers=installed_compilers(),
        process_groups=("hccl", "gloo"),
        parallel=("none", "ddp", "combine_ddp", "zero1", "fsdp", "zero2", "zero3"),
        sync_batchnorm=True,
        streams=True,
        pinned_memory=True,
        overflow_flag=saturates,
    )
