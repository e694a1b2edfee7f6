"""torch's autoload: entry points in the group `torch.backends`, which `import torch` loads and calls.

One that raises takes `import torch` itself down, as a vendor's package does where the vendor's runtime is missing; and
torch cannot be imported a second time in such a process. Except for `import_torch`, only metadata is read here.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelcore.entrypoints import declared
from accelcore.errors import BackendUnavailableError
from accelcore.plugins import Candidate, describe

__all__ = ["VARIABLE", "Autoload", "autoloads", "enabled", "import_torch", "of_unusable_backends"]

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_GROUP = "torch.backends"

_import_error: BaseException | None = None
_import_lock = threading.Lock()


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

    @property
    def package(self) -> str:
        """The top-level package that it calls into."""
        return re.split(r"[.:]", self.value, maxsplit=1)[0]

    def __str__(self) -> str:
        return f"{self.name} = {self.value} ({f'{self.distribution} {self.version}'.strip()})"


def autoloads() -> list[Autoload]:
    """Every entry point that `import torch` would call here."""
    return [
        Autoload(entry.name, entry.point.value, entry.distribution or entry.label, entry.version)
        for entry in declared(_GROUP)
    ]


def enabled(environ: Mapping[str, str]) -> bool:
    """Whether torch would call them; it reads anything but 1 as no."""
    return environ.get(VARIABLE, "1") == "1"


def of_unusable_backends(
    found: Iterable[Autoload], candidates: Iterable[Candidate]
) -> list[tuple[Autoload, Candidate]]:
    """The entry points that load the runtime of a backend which says that it cannot work here, with that backend."""
    found = list(found)
    return [
        (autoload, candidate)
        for candidate in candidates
        if not candidate.probe.available
        for autoload in found
        if _normal(autoload.distribution) in map(_normal, candidate.probe.distributions)
    ]


def import_torch() -> None:
    """Import torch, which every backend needs, so that a failure is not blamed on the backend.

    Raises:
        BackendUnavailableError: torch cannot be imported; the same error again at each later call, because after a
            failure torch is half imported, and importing it once more fails for reasons of its own.
    """
    global _import_error  # as global as sys.modules, of whose state it tells
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
    # torch names the entry point of which an exception came; a SystemExit goes past it.
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
