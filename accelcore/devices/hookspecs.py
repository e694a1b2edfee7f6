"""Hooks that a backend's package implements, and `Probe`, the answer whether its backend can work here.

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
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, get_origin, get_type_hints

import pluggy

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


@dataclass(frozen=True)
class Probe:
    """Answer of a plugin: whether its backend can work here.

    A probe imports no vendor library and initialises no device, so it is quick, and `fork` stays safe.

    Attributes:
        name: the backend's name, equal to its entry point's: ASCII, lower case (`"cpu"`).
        available: whether a backend can be created here.
        reason: why, in one sentence; required if `available` is false.
        remedy: what would make it available; required if `available` is false.
        priority: `auto` takes the available backend with the highest priority. A host CPU has 0, an accelerator 100.
        count: how many devices of this kind this process may use; at least 1 if `available`.
        absent: whether the machine has no such device, as far as files of its driver tell. `auto` then does not warn of
            the backend if an emulator of it is installed: a rehearsal needs no device.
        exclusive: whether each rank of a job needs a device of its own. False for a CPU, which all ranks share.
        api: the version of the plugin interface that the plugin was written for, as a number. None counts as 1, which
            is the only version that plugins could omit.
        environment: names of the environment variables that this backend reads, for `accelcore doctor`.
        distributions: names of the distributions of the vendor's runtime. `accelcore doctor` shows them, and
            `accelcore run` keeps torch from loading the runtime of an unusable backend.
        visible_devices: name of the environment variable that limits which devices a process sees
            (`"CUDA_VISIBLE_DEVICES"`); empty if there is none.
        slurm: the name by which SLURM grants one device, such as `"gpu"`. Empty if the device needs no grant.
        kubernetes: the same in a container's limits, such as `"nvidia.com/gpu"`.
        ray: the same in Ray, such as `"GPU"`.

    Raises:
        ValueError: a field has the wrong type, or the fields contradict each other.
    """

    name: str
    available: bool
    reason: str = ""
    remedy: str = ""
    priority: int = 0
    count: int = 0
    exclusive: bool = True
    api: int | None = None
    environment: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    visible_devices: str = ""
    slurm: str = ""
    kubernetes: str = ""
    ray: str = ""
    absent: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks of a job that fit on this host, one for each device, or one if all ranks share a device."""
        return self.count if self.exclusive else 1

    def __post_init__(self) -> None:
        hints = get_type_hints(Probe) | {"api": NoneType if self.api is None else int}
        for field, kind in hints.items():
            value, of_names = getattr(self, field), get_origin(kind) is tuple
            if type(value) is not (get_origin(kind) or kind) or (of_names and not {str}.issuperset(map(type, value))):
                what = "tuple of str" if of_names else kind.__name__
                raise ValueError(f"probe {self.name!r}: {field} is {value!r}, not a {what}")
        if self.available and self.count < 1:
            raise ValueError(f"probe {self.name!r}: available, but count is {self.count}: it must be 1 or more")
        if self.available and self.absent:
            raise ValueError(f"probe {self.name!r}: available, but absent")
        if not self.available and not (self.reason and self.remedy):
            raise ValueError(f"probe {self.name!r}: not available, and its reason or its remedy is empty")


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
