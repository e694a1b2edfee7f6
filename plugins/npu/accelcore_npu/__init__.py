"""accelcore on Ascend NPU: the plugin's entry module, free of torch and of CANN.

`detection` probes, with `libraries` (files of CANN) and `compatibility` (versions). `backend` composes the roles, one
in a file; `msprobe` compares a model with a dump of the vendor's tool. Nothing here imports the emulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore.devices.hookspecs import Probe, hookimpl
from accelcore.known_faults import KnownFault
from accelcore_npu.detection import detect
from accelcore_npu.known_faults import KNOWN_FAULTS

if TYPE_CHECKING:
    from accelcore.backend import Backend


@hookimpl
def accelcore_probe() -> Probe:
    """Check device files, the environment and package metadata. Import and initialise nothing."""
    return detect()


@hookimpl
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Import torch_npu and compose the backend of one NPU; return None for another name."""
    if name != "npu":
        return None
    from accelcore_npu.backend import create

    return create(index)


@hookimpl
def accelcore_known_faults() -> tuple[KnownFault, ...]:
    """Return the known bugs of torch_npu's kernels and classes."""
    return KNOWN_FAULTS
