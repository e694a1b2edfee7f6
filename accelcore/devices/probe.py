"""Probe: a plugin's report on its device before anything is initialised."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Probe"]


_KINDS = {
    "name": str,
    "available": bool,
    "reason": str,
    "remedy": str,
    "priority": int,
    "count": int,
    "exclusive": bool,
    "api": int,
    "environment": tuple,
    "distributions": tuple,
}


@dataclass(frozen=True)
class Probe:
    """A plugin's answer whether its backend can work here.

    A probe imports no vendor library and initialises no device, so it is quick, and `fork` stays safe.

    Attributes:
        name: the backend's name, equal to its entry point's: ASCII, lower case (`"cpu"`).
        available: whether a backend can be created here.
        reason: why, in one sentence; required if `available` is false.
        remedy: what would make it available; required if `available` is false.
        priority: `auto` takes the available backend with the highest priority. A host CPU has 0, an accelerator 100.
        count: how many devices of this kind this process may use; at least 1 if `available`.
        exclusive: whether each rank of a job needs a device of its own. False for a CPU, which all ranks share.
        api: the version of the plugin interface that the plugin was written for, as a number. The default never
            changes, because old plugins rely on it.
        environment: names of the environment variables that this backend reads, for `accelcore doctor`.
        distributions: names of the distributions of the vendor's runtime. `accelcore doctor` shows them, and
            `accelcore run` keeps torch from loading the runtime of an unusable backend.

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
    api: int = 1
    environment: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, kind in _KINDS.items():
            if type(getattr(self, field)) is not kind:
                raise ValueError(f"probe {self.name!r}: {field} is {getattr(self, field)!r}, not a {kind.__name__}")
        for field in ("environment", "distributions"):
            if not all(type(name) is str for name in getattr(self, field)):
                raise ValueError(f"probe {self.name!r}: {field} is {getattr(self, field)!r}, not a tuple of str")
        if self.available and self.count < 1:
            raise ValueError(f"probe {self.name!r}: available, but count is {self.count}: it must be 1 or more")
        if not self.available and not (self.reason and self.remedy):
            raise ValueError(f"probe {self.name!r}: not available, and its reason or its remedy is empty")
