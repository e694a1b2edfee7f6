"""accelcore on the CPU: the plugin's entry module, free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore.devices.hookspecs import Probe, hookimpl
from accelcore.known_faults import KnownFault
from accelcore_cpu.known_faults import KNOWN_FAULTS

if TYPE_CHECKING:
    from accelcore.backend import Backend


@hookimpl
def accelcore_probe() -> Probe:
    """Return that a CPU is available: the last choice of `auto`, shared by all ranks of a host."""
    return Probe(
        "cpu",
        available=True,
        reason="every machine has one",
        count=1,
        exclusive=False,
        api=1,
        environment=("ACCEL_KERNEL_CACHE",),
    )


@hookimpl
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Create the one CPU backend."""
    if name != "cpu":
        return None
    from accelcore_cpu.backend import create

    return create()


@hookimpl
def accelcore_known_faults() -> tuple[KnownFault, ...]:
    """Return the known bugs of torch's kernels for the CPU."""
    return KNOWN_FAULTS
