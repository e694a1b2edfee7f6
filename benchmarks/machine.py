"""What a benchmark ran on: enough to read its numbers by, nothing that tells whose machine it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["describe_machine", "describe_versions"]


def describe_machine() -> dict[str, str | int]:
    """The processor, how many cores this process may use, and the system."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": _system(),
    }


def describe_versions(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of Python, of these distributions, and "not installed" for those that are not there."""
    versions = {"python": platform.python_version()}
    for distribution in distributions:
        versions[distribution] = "not installed"
        with suppress(PackageNotFoundError):
            versions[distribution] = version(distribution)
    return versions


def _processor() -> str:
    with suppress(OSError):  # Linux; elsewhere the name platform knows has to do
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _system() -> str:
    kind = f"{platform.system()} {platform.machine()}"
    with suppress(OSError):
        return f"{kind}, {platform.freedesktop_os_release()['PRETTY_NAME']}"
    return kind
