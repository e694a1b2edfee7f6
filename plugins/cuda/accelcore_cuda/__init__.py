"""accelcore on CUDA: the plugin's entry module, free of torch and of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore.devices.hookspecs import Probe, hookimpl
from accelcore.known_faults import KnownFault
from accelcore_cuda.detection import detect
from accelcore_cuda.known_faults import KNOWN_FAULTS

if TYPE_CHECKING:
    from accelcore.backend import Backend


@hookimpl
def accelcore_probe() -> Probe:
    """Check device files, the environment and package metadata. Import, load and initialise nothing."""
    return detect()


@hookimpl
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Initialise CUDA and compose the backend of one GPU; return None for another name."""
    if name != "cuda":
        return None
    from accelcore_cuda.backend import create

    return create(index)


@hookimpl
def accelcore_known_faults() -> tuple[KnownFault, ...]:
    """Return the known bugs of torch's kernels and compilers for the GPU."""
    return KNOWN_FAULTS
