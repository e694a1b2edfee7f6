"""Creating a backend: torch, then the plugin's hook, then the optimizers that the plugin and every extension register.

The hook runs in the caller's thread and without a time limit: the vendor's runtime may keep the current device and
other state for each thread, and the first start of a device may take minutes. A start that takes long is logged.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from accelcore import plugins
from accelcore.autoload import import_torch
from accelcore.choices import probe_timeout
from accelcore.errors import AccelError, PluginError
from accelcore.plugins import Candidate

if TYPE_CHECKING:
    from accelcore.backend import Backend

__all__ = ["create_backend"]

logger = logging.getLogger("accelcore")

_LONG = 6  # times ACCEL_PROBE_TIMEOUT: after so long, the log says what everybody is waiting for


def create_backend(candidate: Candidate, index: int, request: str, others: Callable[[], str]) -> Backend:
    """Create the backend of a plugin that said it can work here.

    Args:
        candidate: the plugin.
        index: the device's.
        request: what the user asked for, for messages.
        others: tells what else could be had, where there is an error to tell it in.

    Raises:
        BackendUnavailableError: torch cannot be imported.
        PluginError: the plugin raised something else than an AccelError, or returned something else than the backend.
    """
    import_torch()
    try:
        with _logged_if_long(candidate, index):
            backend = candidate.hooks.accelcore_create_backend(name=candidate.name, index=index)
    except (AccelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(
            f"{request}: {candidate.distribution} could not create its backend",
            why=plugins.describe(error),
            available=others(),
            remedy=f"see the cause above; repair or uninstall {candidate.distribution}, or choose another backend",
        ) from error
    return _with_registered_optimizers(_checked(backend, candidate, index), candidate, request, others)


@contextmanager
def _logged_if_long(candidate: Candidate, index: int) -> Iterator[None]:
    seconds = _LONG * probe_timeout()
    message = "%s has been creating %s:%d for %g seconds; to do without it, name another backend in ACCEL_DEVICE"
    timer = threading.Timer(seconds, logger.warning, (message, candidate.distribution, candidate.name, index, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _checked(backend: object, candidate: Candidate, index: int) -> Backend:
    from accelcore.backend import Backend

    if not isinstance(backend, Backend) or (backend.name, backend.index) != (candidate.name, index):
        raise PluginError(
            f"{candidate.distribution} was asked for {candidate.name}:{index} and returned "
            + (f"{backend.name}:{backend.index}" if isinstance(backend, Backend) else type(backend).__name__),
            remedy=f"report this to the authors of {candidate.distribution}",
        )
    return backend


def _with_registered_optimizers(
    backend: Backend, candidate: Candidate, request: str, others: Callable[[], str]
) -> Backend:
    extended, error = _extended(backend, candidate.hooks)
    if error is not None:
        raise PluginError(
            f"{request}: {candidate.distribution} could not register its optimizers",
            why=plugins.describe(error),
            available=others(),
            remedy=f"repair or uninstall {candidate.distribution}, or choose another backend",
        ) from error
    for extension in plugins.extensions():
        extended, error = _extended(extended, extension.hooks)
        if error is not None:
            logger.warning(
                "extension %s of %s could not register its optimizers for %s: %s",
                extension.name, extension.distribution, candidate.name, plugins.describe(error),
            )  # fmt: skip
    return extended


def _extended(backend: Backend, hooks: Any) -> tuple[Backend, BaseException | None]:
    """The backend with what the hook registers; as it was, with the error, where the hook fails or is late.

    The hook registers in a copy, so that one which fails half way leaves nothing behind, and one that goes on after its
    time is up registers where nobody looks.
    """
    draft = dataclasses.replace(backend, optimizers=backend.optimizers.copy())
    register = partial(hooks.accelcore_register_optimizers, backend=draft, registry=draft.optimizers)
    error = plugins.within_time(_on_current_device(register, backend.device.type))
    return (draft, None) if error is None else (backend, error)


def _on_current_device(function: Callable[[], Any], kind: str) -> Callable[[], Any]:
    """The function, for another thread: each thread has a current device of its own, and starts with the first."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:  # to ask it for its device would initialise it
        return function
    index = torch.accelerator.current_device_index()

    def call() -> Any:
        with torch.accelerator.device_index(index):
            return function()

    return call
