"""Build of the installed torch by its metadata, and the drivers it needs. This module does not import torch.

A wheel of download.pytorch.org names its build in the local version (`2.13.0+cu130`, `+rocm7.1`, `+cpu`). A wheel of
PyPI requires the CUDA runtime it was built for: `cuda-toolkit==13.0.2`, `nvidia-cuda-runtime-cu12==12.6.77`. The build
of any other torch, such as conda's or your own, is unknown and not refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

MINIMUM_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Oldest Linux driver for each major version of CUDA.

From NVIDIA's "CUDA Compatibility", table 1 of "Minor Version Compatibility", and the release notes of the CUDA Toolkit,
which give the full numbers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

_CUDA_LABEL = re.compile(r"cu([0-9]{2})([0-9])(?![0-9])")
_ROCM_LABEL = re.compile(r"rocm([0-9]+)\.([0-9]+)")
_CUDA_RUNTIMES = re.compile(r"cuda-toolkit|nvidia-cuda-runtime(-cu[0-9]+)?")


@dataclass(frozen=True)
class Build:
    """One build of torch."""

    version: str  # torch's, with its label
    runtime: str  # `"cuda"`, `"rocm"`, `"cpu"`, the first word of another label, or empty if unknown
    release: tuple[int, ...] = ()  # major and minor version of the runtime, as far as known

    def __str__(self) -> str:
        names = {"cuda": "CUDA", "rocm": "ROCm"}
        if self.runtime not in names:
            return f"torch {self.version}"
        return f"torch {self.version} for {names[self.runtime]} {'.'.join(map(str, self.release))}".rstrip()


def installed_build() -> Build | None:
    """Return the build of the installed torch; None if torch is not installed."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    _, _, label = installed.partition("+")
    for runtime, pattern in (("cuda", _CUDA_LABEL), ("rocm", _ROCM_LABEL)):
        if match := pattern.match(label):
            return Build(installed, runtime, (int(match[1]), int(match[2])))
    for runtime in ("cpu", "xpu"):
        if label.startswith(runtime):
            return Build(installed, runtime)
    return _required_runtime(installed)


def minimum_driver(build: Build) -> str | None:
    """Return the oldest NVIDIA driver for a build; None if it is not published or the build has no CUDA."""
    return MINIMUM_DRIVERS.get(build.release[0]) if build.runtime == "cuda" and build.release else None


def numbers(dotted: str) -> tuple[int, ...]:
    """Convert a driver version for comparison: `"525.60.13"` to `(525, 60, 13)`."""
    return tuple(int(part) for part in dotted.split("."))


def _required_runtime(installed: str) -> Build:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requires("torch") or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name in ("pytorch-triton-rocm", "triton-rocm"):
            return Build(installed, "rocm")
        if _CUDA_RUNTIMES.fullmatch(name):
            return Build(installed, "cuda", _release(str(requirement.specifier)))
    return Build(installed, "")


def _release(specifier: str) -> tuple[int, ...]:
    match = re.search(r"(?:==|~=|>=)\s*([0-9]+)(?:\.([0-9]+))?", specifier)
    return tuple(int(part) for part in match.groups() if part) if match else ()
