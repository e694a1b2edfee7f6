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

from accelcore.errors import BackendUnavailableError, ConfigurationError

__all__ = ["INSTALL", "TORCH_NPU", "cache", "check_torch", "path_entry", "place", "torch_npu", "within"]

TORCH_NPU = "2.13.0"
"""Version of torch-npu, and of torch, that the emulator works with."""

INSTALL = "python -m accelcore_npu_emulator.install"
"""Command that puts torch-npu into the cache."""


def torch_npu() -> Distribution:
    """Return the metadata of torch-npu: of an installed one, or of the one in the cache.

    Raises:
        BackendUnavailableError: there is none, or its version or torch's does not fit.
    """
    check_torch()
    found = _importable() or within(place())
    if found is None:
        raise BackendUnavailableError(
            "the NPU cannot be emulated", why=f"torch-npu {TORCH_NPU} is not in {place()}", remedy=INSTALL
        )
    if found.version != TORCH_NPU:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"the emulator works with torch-npu {TORCH_NPU}, and {found.version} is installed",
            remedy=f"use a virtual environment without torch-npu, and there: {INSTALL}",
        )
    return found


def path_entry() -> str | None:
    """Return the folder to append to the path of an emulated process; None if Python finds torch-npu without it."""
    return None if _importable() else str(place())


def cache() -> Path:
    """Return the emulator's folder in the user's cache, and create it if needed.

    Raises:
        ConfigurationError: it cannot be written.
    """
    folder = _cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except OSError as error:
        raise ConfigurationError(
            "the NPU cannot be emulated without a folder for its files",
            why=str(error),
            remedy="make the folder writable, or name another one in XDG_CACHE_HOME",
        ) from error
    return folder


def _cache() -> Path:
    # By the XDG rules, ignore a relative path.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "accelcore" / "emulated-npu"


def place() -> Path:
    """Return torch-npu's folder. It names what the wheel was built for, because machines and Pythons share caches."""
    return _cache() / f"torch-npu-{TORCH_NPU}-{sys.implementation.cache_tag}-{platform.machine()}"


def _importable() -> Distribution | None:
    try:
        return distribution("torch-npu")
    except PackageNotFoundError:
        return None


def within(folder: Path) -> Distribution | None:
    """Return the metadata of torch-npu in a folder, or None."""
    return next(iter(Distribution.discover(name="torch-npu", path=[str(folder)])), None)


def check_torch() -> None:
    """Raise BackendUnavailableError if torch is missing or has another version."""
    try:
        version = distribution("torch").version
    except PackageNotFoundError as error:
        raise BackendUnavailableError(
            "the NPU cannot be emulated", why="torch is not installed", remedy=f"pip install torch=={TORCH_NPU}"
        ) from error
    if version.partition("+")[0] != TORCH_NPU:
        raise BackendUnavailableError(
            "the NPU cannot be emulated",
            why=f"torch-npu {TORCH_NPU} is built for torch {TORCH_NPU}, and torch {version} is installed",
            remedy=f"pip install torch=={TORCH_NPU}, in a virtual environment of its own if others need {version}",
        )
