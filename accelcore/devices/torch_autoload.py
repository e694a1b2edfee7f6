"""torch's autoload: entry points in the group `torch.backends`, which `import torch` loads and calls.

If one raises, `import torch` fails, and cannot succeed again in that process. A vendor's package raises if the vendor's
runtime is missing. Except for `import_torch`, this module only reads metadata.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelcore.devices.plugins import Candidate, declared, describe
from accelcore.errors import BackendUnavailableError

__all__ = ["VARIABLE", "Autoload", "autoloads", "enabled", "import_torch", "of_unusable_backends"]

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_GROUP = "torch.backends"

_import_error: BaseException | None = None
_import_lock = threading.Lock()


@dataclass(frozen=True)
class Autoload:
    """One entry point that `import torch` calls: its name, its function `module:function`, and who declares it."""

    name: str
    value: str
    distribution: str
    version: str

    @property
    def package(self) -> str:
        """The top-level package of the function."""
        return re.split(r"[.:]", self.value, maxsplit=1)[0]

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({f'{self.distribution} {self.version}'.strip()})"


def autoloads() -> list[Autoload]:
    """Return every entry point that `import torch` would call."""
    return [
        Autoload(entry.name, entry.point.value, entry.distribution or entry.label, entry.version)
        for entry in declared(_GROUP)
    ]


def enabled(environ: Mapping[str, str]) -> bool:
    """Return whether torch would call them: if the variable is 1 or not set."""
    return environ.get(VARIABLE, "1") == "1"


def of_unusable_backends(
    found: Iterable[Autoload], candidates: Iterable[Candidate]
) -> list[tuple[Autoload, Candidate]]:
    """Return the entry points that load the runtime of an unusable backend, with that backend."""
    found = list(found)
    return [
        (autoload, candidate)
        for candidate in candidates
        if not candidate.probe.available
        for autoload in found
        if _normal(autoload.distribution) in map(_normal, candidate.probe.distributions)
    ]


def import_torch() -> None:
    """Import torch, so that a failure is not blamed on the backend.

    Raises:
        BackendUnavailableError: torch cannot be imported. Later calls raise the same error, because torch is half
            imported then, and another import would fail with a misleading error.
    """
    global _import_error  # global, as sys.modules is
    with _import_lock:
        if _import_error is None:
            try:
                import torch  # noqa: F401
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # an autoload may raise anything, or exit
                _import_error = error
    if _import_error is not None:
        raise _unavailable(_import_error) from _import_error


def _unavailable(error: BaseException) -> BackendUnavailableError:
    what, root = "torch cannot be imported in this process", error
    while root.__cause__ is not None:
        root = root.__cause__
    found = autoloads() if enabled(os.environ) else []
    # torch's error names the entry point that raised, except for SystemExit.
    culprits = [autoload for autoload in found if f": {autoload.name}." in str(error)] or (
        found if isinstance(error, SystemExit) else []
    )
    if not culprits:
        return BackendUnavailableError(what, why=describe(root), remedy="repair the installation of torch")
    return BackendUnavailableError(
        what,
        why=f"it loads {'; '.join(map(str, culprits))}, which raised {describe(root)}",
        remedy=f"start the script with {VARIABLE}=0, or repair or uninstall "
        + ", ".join(sorted({autoload.distribution for autoload in culprits})),
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
