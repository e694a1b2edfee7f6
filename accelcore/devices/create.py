"""Create a backend: import torch, call the plugin's hook, and let the plugin and extensions register optimizers.

`import torch` loads plugins of torch, by entry points in the group `torch.backends`. If one raises, such as a vendor's
package whose runtime is missing, the import fails, and cannot succeed again in that process.

The hooks run in the caller's thread, because vendors' runtimes keep state such as the current device for each thread.
They have no time limit, because the first start of a device may take minutes.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

from accelcore.backend import Backend
from accelcore.devices import plugins
from accelcore.devices.plugins import AUTOLOAD, Candidate, autoload_enabled, autoloads, broken
from accelcore.errors import AccelError, BackendUnavailableError, PluginError, logger

_import_error: BaseException | None = None
_import_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Found:
    """A device that is available according to its plugin's probe."""

    candidate: Candidate
    index: int
    request: str  # the user's request, for messages

    def __str__(self) -> str:
        return f"{self.candidate.name}:{self.index}"


def create_backend(found: Found) -> Backend:
    """Create the backend of a device."""
    candidate, index = found.candidate, found.index
    remedy = f"repair or uninstall {candidate.distribution}, or choose another backend"
    import_torch()
    try:
        backend = candidate.hooks.accelcore_create_backend(name=candidate.name, index=index)
    except (AccelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = f"{found.request}: {candidate.distribution} could not create its backend"
        raise broken(candidate, what, error, remedy) from error
    if not isinstance(backend, Backend) or (backend.name, backend.index) != (candidate.name, index):
        returned = f"{backend.name}:{backend.index}" if isinstance(backend, Backend) else type(backend).__name__
        raise PluginError(
            f"{candidate.distribution} was asked for {candidate.name}:{index} and returned {returned}",
            remedy=f"report this to the authors of {candidate.distribution}",
        )
    extended, failure = _extended(backend, candidate.hooks)
    if failure is not None:
        what = f"{found.request}: {candidate.distribution} could not register its optimizers"
        raise broken(candidate, what, failure, remedy) from failure
    for extension in plugins.extensions():
        extended, failure = _extended(extended, extension.hooks)
        if failure is not None:
            logger.warning(
                "extension %s of %s could not register its optimizers for %s: %s",
                extension.name, extension.distribution, candidate.name, plugins.describe_error(failure),
            )  # fmt: skip
    return extended


def _extended(backend: Backend, hooks: Any) -> tuple[Backend, BaseException | None]:
    """Return the backend with the optimizers that the hook registers, or the backend as it is and the hook's error.

    The hook gets a copy of the registry, which is dropped if the hook fails.
    """
    draft = dataclasses.replace(backend, optimizers=backend.optimizers.copy())
    try:
        hooks.accelcore_register_optimizers(backend=draft, registry=draft.optimizers)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit too: a plugin must not end the program
        return backend, error
    return draft, None


def import_torch() -> None:
    """Import torch, so that a failure is not blamed on the backend.

    Later calls raise the same error: torch is half imported then, and another import would fail with a misleading one.
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
        raise _without_torch(_import_error) from _import_error


def _without_torch(error: BaseException) -> BackendUnavailableError:
    why, remedy, root = "", "repair the installation of torch", error
    while root.__cause__ is not None:
        root = root.__cause__
    found = autoloads() if autoload_enabled(os.environ) else []
    # torch's error names the entry point that raised; SystemExit, and a second import in one process, name none.
    culprits = [autoload for autoload in found if f": {autoload.name}." in str(error)] or found
    if culprits:
        owners = ", ".join(sorted({autoload.distribution or autoload.label for autoload in culprits}))
        why = f"; import torch loads {'; '.join(map(str, culprits))}"
        remedy = (
            f"start the script with {AUTOLOAD}=0, or repair {owners} and the vendor's runtime that it needs, or "
            f"uninstall {owners}; if torch itself is broken, {remedy}"
        )
    return BackendUnavailableError(
        "torch cannot be imported in this process", why=plugins.describe_error(root) + why, remedy=remedy
    )
