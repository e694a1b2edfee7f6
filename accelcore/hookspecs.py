"""The hooks by which a backend package enters accelcore. Free of torch; nothing here runs in a training loop.

A backend package has a light entry module that implements the first two hooks, and names it in its metadata::

    [project.entry-points."accelcore.backends"]
    mydevice = "accelcore_mydevice"

A package that only adds optimizers to somebody else's backend implements the third and uses the group
`accelcore.extensions`. One that imitates a backend's device on the host implements the fourth, and uses the group
`accelcore.emulators` with the backend's name. The fifth is for backends that know which of
the kernels under them are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from accelcore.backend import Backend
    from accelcore.known_faults import KnownFault
    from accelcore.probe import Probe
    from accelcore.roles.optimizers import Optimizers

__all__ = [
    "API",
    "accelcore_create_backend",
    "accelcore_emulate",
    "accelcore_known_faults",
    "accelcore_probe",
    "accelcore_register_optimizers",
    "hookimpl",
]

API = 1
"""Version of this interface. It rises when a plugin has to change; plugins for the version before go on working.

A plugin states the version that it was written for as a number, `Probe(..., api=1)`. This constant would be the version
of whatever accelcore is installed, and so say of an old plugin that it is new.
"""

hookspec = pluggy.HookspecMarker("accelcore")
hookimpl = pluggy.HookimplMarker("accelcore")
"""Marks a function of a plugin as the implementation of the hook with the same name."""


@hookspec
def accelcore_probe() -> Probe:  # type: ignore[empty-body]  # a hook specification has no body
    """Say whether this backend can work here, why, and what would make it work.

    Imports no vendor library, initialises no device, returns within a second. An answer that takes longer than
    ACCEL_PROBE_TIMEOUT seconds (5 by default) is reported as a failure.
    """


@hookspec(firstresult=True)
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Create the backend `name` on device `index`; None where `name` is not this plugin's.

    Called after a probe that said `available`, in the thread of `select()`, with torch imported and without a time
    limit. This is the place to import the vendor's runtime. A device that turns out not to work is a
    `BackendUnavailableError` to be raised here.
    """


@hookspec
def accelcore_register_optimizers(backend: Backend, registry: Optimizers) -> None:
    """Register optimizers, or faster routes to known ones, for `backend`.

    Called once for each backend created, for every extension, whatever the backend: look at
    `backend.capabilities` and return where there is nothing to add. It runs in a thread of its own, whose current
    device is the caller's. What it registers counts if it returns within ACCEL_PROBE_TIMEOUT seconds, and is dropped
    as a whole if it raises or takes longer.
    """


@hookspec(firstresult=True)
def accelcore_emulate(name: str, devices: int) -> Mapping[str, str] | None:
    """Prepare an emulation of the backend `name` on the host: the environment variables of a process that uses it.

    Called by `accelcore run --emulate`, before the process begins; nothing else of accelcore loads an emulator. The
    backend must say `emulated=True` in such a process, and whatever it reports must say so too. None where `name` is
    not this plugin's.

    Args:
        name: the backend.
        devices: how many devices the ranks need; there may be more.
    """


@hookspec
def accelcore_known_faults() -> Iterable[KnownFault]:  # type: ignore[empty-body]  # a hook specification has no body
    """List the kernels that this backend knows to be wrong, in whatever version, for `accelcore doctor`.

    Like `accelcore_probe` it imports no vendor library and returns at once. It only tells: what avoids a wrong kernel
    is the backend, where it registers its routes (`Optimizers.distrust`) or sets up its compiler.
    """
