"""Devices of torch that no installed plugin serves, and packages that answer for one of torch's device modules.

This module looks at a torch that is loaded. It does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions

from accelcore.devices import plugins
from accelcore.devices.plugins import declared

__all__ = ["imitations", "ten_lines", "unserved_device"]

_TEN_LINES = """\
from accelcore import Probe, hookimpl


@hookimpl
def accelcore_probe():
    return Probe("{name}", available=True, priority=50, count=1, api=1)


@hookimpl
def accelcore_create_backend(name, index):
    from accelcore.roles import from_torch  # only now is torch imported

    return from_torch("{name}", index) if name == "{name}" else None
"""


def ten_lines(name: str) -> str:
    """Return the module that makes torch's device `name` a backend.

    Its distribution names it in the entry-point group `accelcore.backends`.
    """
    return _TEN_LINES.format(name=name)


def unserved_device() -> str | None:
    """Return torch's accelerator if it works here and no installed plugin has its name; None without a loaded torch."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)  # absent while torch is being imported
    current = None if accelerator is None else accelerator.current_accelerator()
    if accelerator is None or current is None or current.type in {entry.name for entry in declared(plugins.BACKENDS)}:
        return None
    return str(current.type) if accelerator.is_available() else None  # asked last: it may start a driver


def imitations() -> Iterator[str]:
    """Yield a sentence for each of torch's own device modules that another package answers for."""
    torch = sys.modules.get("torch")
    for name in sorted(vars(torch)) if torch is not None else ():
        own = sys.modules.get(f"torch.{name}")
        count = getattr(getattr(torch, name), "device_count", None)
        package = str(getattr(count, "__module__", "torch")).partition(".")[0]
        if count is not None and getattr(own, "__name__", "") == f"torch.{name}" and package != "torch":
            owners = ", ".join(packages_distributions().get(package, [package]))
            yield f"torch.{name} is answered by {package} ({owners}), not by torch"
