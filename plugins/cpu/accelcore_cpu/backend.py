"""The CPU backend: six roles on torch's CPU kernels, oneDNN, gloo and inductor."""

from __future__ import annotations

import os

import torch

from accelcore.backend import Backend
from accelcore.devices import Capabilities
from accelcore.jobs.collectives import TorchCollectives
from accelcore.roles.compiler import TorchCompiler
from accelcore.roles.runtime import TorchRuntime
from accelcore.scaling.dynamic import Scalers
from accelcore.util.text import first_line
from accelcore_cpu.fork import make_fork_safe
from accelcore_cpu.kernels.library import unavailable
from accelcore_cpu.kernels.store import check_named_folder
from accelcore_cpu.optimizers import FUSED, NATIVE, create_optimizers
from accelcore_cpu.precision import CpuPrecision
from accelcore_cpu.processor import fast_format


def declare(*, compiler: bool) -> Capabilities:
    """Return the CPU's capabilities; `compiler`: whether a C++ compiler can build our kernels."""
    return Capabilities(
        autocast_dtypes=("bfloat16", "float16"),
        autocast_tables=("torch", "O1"),
        fast_fp32=fast_format(),
        model_dtypes=("float32", "float64", "bfloat16", "float16"),
        native_optimizers=tuple(sorted({*FUSED, *(NATIVE if compiler else ())})),
        compilers=("inductor",),
        process_groups=("gloo",),
        parallel=("none", "ddp", "combine_ddp", "zero1", "fsdp", "zero2", "zero3"),
    )


def create() -> Backend:
    """Compose the CPU backend, and make this process safe to fork while it trains."""
    make_fork_safe()
    check_named_folder()  # now, not when the first optimizer is made
    device = torch.device("cpu")
    capabilities = declare(compiler=unavailable(build=False) is None)
    return Backend(
        name="cpu",
        index=0,
        emulated=False,
        capabilities=capabilities,
        precision=CpuPrecision(capabilities),
        scaler=Scalers(device),
        optimizers=create_optimizers(),
        collectives=TorchCollectives(device, "gloo", records={"TORCH_FR_BUFFER_SIZE": "16"}),
        compiler=TorchCompiler(missing_compiler),
        runtime=TorchRuntime(device),
    )


def missing_compiler() -> str | None:
    """Return why inductor cannot compile here, or None. CXX counts, as for inductor."""
    # Importing inductor takes seconds, which only those who compile should wait for.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except OSError as error:
        return (
            f"the C++ compiler CXX={os.environ.get('CXX')!r} cannot be run: {error} (name one that can, or unset CXX)"
        )
    except InvalidCxxCompiler as error:
        return f"{first_line(error)} (install g++, or name a compiler in CXX)"
    return None
