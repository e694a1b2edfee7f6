"""accelcore on CUDA: the plugin's entry module, free of torch and of the driver.

This release finds out whether CUDA could work here and why not; the backend itself is not part of it yet, and the
probe says so.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from accelcore.errors import BackendUnavailableError
from accelcore.hookspecs import hookimpl
from accelcore.probe import Probe

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["accelcore_create_backend", "accelcore_probe"]

_DEVICES = Path("/dev")
_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME")
# Those that decide whether a torch and a driver fit together. CUDA 13 dropped the version from their names.
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
_NOT_YET = "this release of accelcore-cuda finds GPUs but has no backend to drive them"
_NOT_YET_REMEDY = "use another backend, such as cpu, or a later release of accelcore-cuda"


@hookimpl
def accelcore_probe() -> Probe:
    """Look at device files, CUDA_VISIBLE_DEVICES and torch's metadata; nothing is imported or initialised."""
    reason, remedy = _obstacle()
    return Probe(
        "cuda",
        available=False,
        reason=reason,
        remedy=remedy,
        priority=100,
        environment=_ENVIRONMENT,
        distributions=_DISTRIBUTIONS,
    )


@hookimpl
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Refuse: there is no CUDA backend in this release."""
    if name != "cuda":
        return None
    raise BackendUnavailableError(f"cuda:{index} cannot be used", why=_NOT_YET, remedy=_NOT_YET_REMEDY)


def _obstacle() -> tuple[str, str]:
    gpus = [path for path in _DEVICES.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    if not (_DEVICES / "nvidiactl").exists():
        return "no NVIDIA driver is loaded (there is no /dev/nvidiactl)", "install the NVIDIA driver for your GPU"
    if not gpus:
        return "the NVIDIA driver is loaded, but it shows no GPU", "see what nvidia-smi says"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES, or name a GPU in it"
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return "torch is not installed", "pip install torch"
    if torch_version.endswith("+cpu"):
        return f"torch {torch_version} is built without CUDA", "install a CUDA build of torch"
    return _NOT_YET, _NOT_YET_REMEDY
