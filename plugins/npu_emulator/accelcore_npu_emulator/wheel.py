"""Find torch-npu: importable, or in its folder in the user's cache.

It stays out of site-packages: torch, transformers and others import torch_npu wherever they find it, and without CANN
that import fails. Only emulated processes have the folder on their path.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from accelcore_npu import compatibility

from accelcore.errors import BackendUnavailableError, ConfigurationError
from accelcore.util.files import user_cache

RELEASES = {"2.7.1": "2.7.1.post11", "2.10.0": "2.10.0.post7", "2.13.0": "2.13.0", "2.14.0": "2.14.0"}
"""Releases of torch that the emulator works with, and the torch-npu for each that it is tested with."""

INSTALL = "python -m accelcore_npu_emulator.install"
"""Command that puts torch-npu into the cache."""


def torch_npu() -> Distribution:
    """Return the metadata of torch-npu: of an installed one, or of the one in the cache.

    An installed one may be another release for the same torch than the one in `RELEASES`.
    """
    wanted, torch = fitting(), distribution("torch").version
    found = _importable() or within(place())
    if found is None:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"torch-npu {wanted}, which fits torch {torch}, is not in {place()}",
            remedy=INSTALL,
        )
    if compatibility.torch_of(found.version) != compatibility.torch_of(torch):
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"torch {torch} needs torch-npu {wanted}, and {found.version} is installed",
            remedy=f"use a virtual environment without torch-npu, and there: {INSTALL}",
        )
    return found


def path_entry() -> str | None:
    """Return the folder to append to the path of an emulated process; None if Python finds torch-npu without it."""
    return None if _importable() else str(place())


def cache() -> Path:
    """Return the emulator's folder in the user's cache, and create it if needed."""
    folder = _cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        raise _no_folder(error) from error
    return folder


def _cache() -> Path:
    try:
        return user_cache() / "emulated-npu"
    except OSError as error:
        raise _no_folder(error) from error


def _no_folder(error: OSError) -> ConfigurationError:
    return ConfigurationError(
        "the NPU cannot be emulated without a folder for its files",
        why=str(error),
        remedy="make the folder writable, or name another one in XDG_CACHE_HOME",
    )


def place() -> Path:
    """Return torch-npu's folder. It names what the wheel was built for, because machines and Pythons share caches."""
    return _cache() / f"torch-npu-{fitting()}-{sys.implementation.cache_tag}-{platform.machine()}"


def _importable() -> Distribution | None:
    try:
        return distribution("torch-npu")
    except PackageNotFoundError:
        return None


def within(folder: Path) -> Distribution | None:
    """Return the metadata of torch-npu in a folder, or None."""
    return next(iter(Distribution.discover(name="torch-npu", path=[str(folder)])), None)


def fitting() -> str:
    """Return the version of torch-npu to install for the installed torch."""
    *_, newest = RELEASES
    try:
        torch = distribution("torch").version
    except PackageNotFoundError as error:
        raise BackendUnavailableError(
            "the NPU cannot be emulated", why="torch is not installed", remedy=f"pip install torch=={newest}"
        ) from error
    release = compatibility.torch_of(torch)
    if release not in RELEASES:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"torch {torch} is installed, and the emulator works with no torch-npu for torch {release}",
            available=", ".join(f"torch {torch} with torch-npu {npu}" for torch, npu in RELEASES.items()),
            remedy=f"pip install torch=={newest}, in a virtual environment of its own if others need {torch}",
        )
    return RELEASES[release]
