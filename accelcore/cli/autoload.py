"""torch's autoload: entry points in the group `torch.backends`, which `import torch` loads and calls.

One that raises takes `import torch` itself down, as a vendor's package does where the vendor's runtime is missing.
Only metadata is read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from accelcore.plugins import Candidate

__all__ = ["VARIABLE", "Autoload", "autoloads", "doomed", "enabled"]

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_GROUP = "torch.backends"


@dataclass(frozen=True)
class Autoload:
    """One entry point that `import torch` calls.

    Attributes:
        name: the entry point's name, which torch's own error gives.
        value: what it calls, `module:function`.
        distribution: the distribution that brings it, without its version.
        version: that distribution's version.
    """

    name: str
    value: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({self.distribution} {self.version})"


def autoloads() -> list[Autoload]:
    """Every entry point that `import torch` would call here."""
    found = []
    for point in entry_points(group=_GROUP):
        name, version = (point.dist.name, point.dist.version) if point.dist else ("an unnamed distribution", "")
        found.append(Autoload(point.name, point.value, name, version))
    return sorted(found, key=lambda autoload: (autoload.name, autoload.distribution))


def enabled(environ: Mapping[str, str]) -> bool:
    """Whether torch would call them; it reads anything but 1 as no."""
    return environ.get(VARIABLE, "1") == "1"


def doomed(found: Iterable[Autoload], candidates: Iterable[Candidate]) -> list[tuple[Autoload, Candidate]]:
    """The entry points that load the runtime of a backend which says that it cannot work here, with that backend."""
    found = list(found)
    return [
        (autoload, candidate)
        for candidate in candidates
        if not candidate.probe.available
        for autoload in found
        if _normal(autoload.distribution) in map(_normal, candidate.probe.distributions)
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
