"""Detection of CUDA by device files, environment and metadata. This module does not import torch.

It imports, loads and initialises nothing, so the process may still fork afterwards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from accelcore.devices.hookspecs import Probe
from accelcore.devices.plugins import AUTOLOAD, autoload_enabled, autoloads
from accelcore_cuda import amd, nvidia
from accelcore_cuda.builds import Build, installed_build, minimum_driver, numbers
from accelcore_cuda.visible import Fault, Hardware

_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUBLAS_WORKSPACE_CONFIG",
    "HIP_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "NVIDIA_TF32_OVERRIDE",
    "ROCR_VISIBLE_DEVICES",
    AUTOLOAD,
)
# They decide whether a torch and a driver fit together. CUDA 13 dropped the version from their names.
_DISTRIBUTIONS = tuple(
    f"nvidia-{library}{suffix}"
    for library, suffixes in (
        ("cuda-runtime", ("", "-cu12")),
        ("cublas", ("", "-cu12")),
        ("cudnn", ("-cu13", "-cu12")),
        ("nccl", ("-cu13", "-cu12")),
    )
    for suffix in suffixes
)
_TRANSFER = "torch_npu.contrib.transfer_to_npu"


def detect() -> Probe:
    """Return the plugin's probe."""
    build = installed_build()
    rocm = build is not None and build.runtime == "rocm"
    hardware = amd.look(os.environ) if rocm else nvidia.look(os.environ)
    if not isinstance(hardware, Hardware):
        if build is not None and not rocm and amd.present():
            hardware = f"there is an AMD GPU, and {build} is not built for ROCm", "install a ROCm build of torch"
        return _probe(*hardware, rocm=rocm)
    fault = _torch_fault(hardware, build) or _in_the_way()
    if fault is not None:
        return _probe(*fault, rocm=rocm)
    words = "; ".join([f"{hardware.words}, {build}", *hardware.notes, *_notices()])
    return _probe(words, count=hardware.count, rocm=rocm)


def _probe(reason: str, remedy: str = "", count: int = 0, *, rocm: bool) -> Probe:
    return Probe(
        "cuda",
        available=not remedy,
        reason=reason,
        remedy=remedy,
        priority=100,
        count=count,
        api=1,
        visible_devices="HIP_VISIBLE_DEVICES" if rocm else "CUDA_VISIBLE_DEVICES",
        slurm="gpu",
        kubernetes="amd.com/gpu" if rocm else "nvidia.com/gpu",
        ray="GPU",
        environment=_ENVIRONMENT,
        distributions=_DISTRIBUTIONS,
    )


def _torch_fault(hardware: Hardware, build: Build | None) -> Fault | None:
    if build is None:
        return "torch is not installed", "pip install torch"
    if build.runtime not in ("cuda", "rocm", ""):
        return f"{build} is built without CUDA", "install a CUDA build of torch"
    minimum = minimum_driver(build)
    if minimum and hardware.driver and numbers(hardware.driver) < numbers(minimum):
        return (
            f"the NVIDIA driver {hardware.driver} is too old for {build}, which needs {minimum} or newer",
            "install a newer driver, or a torch built for an older CUDA",
        )
    return None


def _in_the_way() -> Fault | None:
    """Report torch_npu: torch has one accelerator a process, and torch_npu refuses to be imported beside a GPU."""
    if _TRANSFER in sys.modules:
        return "transfer_to_npu is active: torch.cuda is torch.npu in this process", f"do not import {_TRANSFER}"
    if "torch" not in sys.modules and "torch_npu" in _autoloaded():
        return (
            "torch-npu is installed, which makes `import torch` fail beside a GPU that works",
            f"export {AUTOLOAD}=0, start the script with accelcore run, or uninstall torch-npu",
        )
    return None


def _autoloaded() -> set[str]:
    """Return the modules of other accelerators that `import torch` would load."""
    if not autoload_enabled(os.environ):
        return set()
    return {autoload.package for autoload in autoloads()}


def _notices() -> Iterator[str]:
    others = sorted(_autoloaded() - {"torch_npu"})
    if others:
        yield f"torch also loads {', '.join(others)}: one process has one accelerator"
