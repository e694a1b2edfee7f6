"""The CUDA backend: six roles on torch.cuda. Creating it initialises CUDA in this process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from accelcore.backend import Backend
from accelcore.errors import BackendUnavailableError, logger
from accelcore.jobs.collectives import NoCollectives
from accelcore.scaling.dynamic import Scalers
from accelcore.util.text import first_line
from accelcore_cuda.collectives import CudaCollectives
from accelcore_cuda.compiler import CudaCompiler, missing_for_inductor
from accelcore_cuda.declaration import declare, emulates_bfloat16, missing_kernels
from accelcore_cuda.optimizers import create_optimizers, fused_kernels
from accelcore_cuda.precision import CudaPrecision
from accelcore_cuda.runtime import CudaRuntime, refuse_fork


def create(index: int) -> Backend:
    """Compose the backend of one GPU."""
    _initialise(index)
    device = torch.device("cuda", index)
    compute, rocm = torch.cuda.get_device_capability(device), torch.version.hip is not None
    nccl = dist.is_nccl_available()
    capabilities = declare(compute, rocm=rocm, nccl=nccl, fused=fused_kernels())
    logger.info("cuda:%d: %s", index, torch.cuda.get_device_name(device))
    return Backend(
        name="cuda",
        index=index,
        emulated=False,
        capabilities=capabilities,
        precision=CudaPrecision(capabilities, emulated_bfloat16=emulates_bfloat16(compute, rocm=rocm)),
        scaler=Scalers(device),
        optimizers=create_optimizers(
            capabilities.native_optimizers, no_compiler=missing_for_inductor(compute, rocm=rocm)
        ),
        collectives=CudaCollectives(device) if nccl else NoCollectives(),
        compiler=CudaCompiler(compute, rocm=rocm),
        runtime=CudaRuntime(device),
    )


def _initialise(index: int) -> None:
    """Start CUDA, check the GPU, and make it the current one, which `.cuda()` and a loader's pinning thread use."""
    what = f"cuda:{index} cannot be used"
    refuse_fork()
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        raise BackendUnavailableError(
            what,
            why=first_line(error) or type(error).__name__,
            remedy="run accelcore doctor and nvidia-smi to find the cause",
        ) from error
    if index >= count:
        raise BackendUnavailableError(
            f"there is no device cuda:{index}",
            available=", ".join(f"cuda:{number}" for number in range(count)),
            remedy="choose one of these, and check CUDA_VISIBLE_DEVICES",
        )
    if torch.version.hip is None:
        reason = missing_kernels(torch.cuda.get_device_capability(index), torch.cuda.get_arch_list())
        if reason is not None:
            raise BackendUnavailableError(
                what, why=reason, remedy="install a build of torch for this GPU: an older CUDA for an older GPU"
            )
    torch.cuda.set_device(index)
