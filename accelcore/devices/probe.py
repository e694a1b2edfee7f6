"""`Probe`: answer of a plugin to `accelcore_probe`. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import get_origin, get_type_hints


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
        slurm, kubernetes, ray: the names by which these schedulers grant one device: a generic resource of SLURM
            (`"gpu"`), a resource of a container's limits (`"nvidia.com/gpu"`), a resource of Ray (`"GPU"`). Empty if
            the device needs no grant.

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
        """Number of ranks of a job that fit on this host: one for each device, or one if all ranks share a device."""
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
