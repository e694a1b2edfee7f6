"""Hooks that a backend's package implements.

This module imports no torch, and no hook runs in a training loop.

A backend package has a light entry module that implements `accelcore_probe` and `accelcore_create_backend`. The
package's metadata names that module::

    [project.entry-points."accelcore.backends"]
    mydevice = "accelcore_mydevice"

A backend may also implement `accelcore_register_optimizers` and `accelcore_known_faults`. A package that only adds
optimizers to other backends implements `accelcore_register_optimizers`, in the group `accelcore.extensions`. A package
that emulates a backend's device on the host implements `accelcore_emulate`, in the group `accelcore.emulators` with the
backend's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

from accelcore.devices import Probe

if TYPE_CHECKING:
    from accelcore.backend import Backend
    from accelcore.known_faults import KnownFault
    from accelcore.optim.registry import Optimizers

__all__ = [
    "API", "Probe", "accelcore_create_backend", "accelcore_emulate", "accelcore_known_faults", "accelcore_probe",
    "accelcore_register_optimizers", "hookimpl",
]  # fmt: skip

API = 1
"""Version of this interface. It rises if plugins have to change; plugins for the previous version still work.

A plugin states its version as a number, `Probe(..., api=1)`. It must not use this constant, which is the version of the
installed accelcore.
"""

hookspec = pluggy.HookspecMarker("accelcore")
hookimpl = pluggy.HookimplMarker("accelcore")
"""Mark a function of a plugin as the implementation of the hook with the same name."""


@hookspec
def accelcore_probe() -> Probe:  # type: ignore[empty-body]  # a hook specification has no body
    """Report whether this backend can work here, why, and what would make it work.

    It imports no vendor library, initialises no device, and returns within a second. An answer that takes longer than
    ACCEL_PROBE_TIMEOUT seconds (5 by default) counts as a failure.
    """


@hookspec(firstresult=True)
def accelcore_create_backend(name: str, index: int) -> Backend | None:
    """Create the backend `name` on device `index`; return None if `name` is not this plugin's.

    Called after a probe with `available=True`, in the thread of `select()`, with torch imported and without a time
    limit. Import the vendor's runtime here, and raise `BackendUnavailableError` if the device does not work.
    """


@hookspec
def accelcore_register_optimizers(backend: Backend, registry: Optimizers) -> None:
    """Register optimizers, or faster routes to known ones, for `backend`.

    Every extension is called for each backend that is created: look at `backend.capabilities`, and return if there is
    nothing to add. The call runs in the thread of `select()`, without a time limit. If it raises, everything that it
    registered is dropped.
    """


@hookspec(firstresult=True)
def accelcore_emulate(name: str, devices: int) -> Mapping[str, str] | None:
    """Prepare an emulation of the backend `name` on the host; return the environment variables of a process with it.

    Only `accelcore run --emulate` calls it, before the process begins. The backend must have `emulated=True` in such a
    process, and its reports must contain the word EMULATED. Return None if `name` is not this plugin's.

    Args:
        name: the backend.
        devices: how many devices the ranks need; there may be more.
    """


@hookspec
def accelcore_known_faults() -> Iterable[KnownFault]:  # type: ignore[empty-body]  # a hook specification has no body
    """List this backend's known kernel bugs, of all versions, for `accelcore doctor`.

    Like `accelcore_probe` it imports no vendor library and returns at once. The list has no effect by itself: the
    backend avoids a kernel when it registers its routes (`Optimizers.distrust`) or sets up its compiler.
    """
