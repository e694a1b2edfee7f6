"""What the installed torch is built for, from its metadata, and the drivers that its CUDA runs on. Free of torch.

A wheel of download.pytorch.org says what it is in its local version (`2.13.0+cu130`, `+rocm7.1`, `+cpu`). One of PyPI
has none, and requires the CUDA runtime it was built for: `cuda-toolkit==13.0.2`, `nvidia-cuda-runtime-cu12==12.6.77`.
A torch that says neither, from conda or built at home, is not judged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

__all__ = ["MINIMUM_DRIVERS", "Build", "installed_build", "minimum_driver", "numbers"]

MINIMUM_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""CUDA's major version -> the oldest Linux driver for it.

From NVIDIA's "CUDA Compatibility", table 1 of "Minor Version Compatibility", and the release notes of the CUDA Toolkit,
which give the full numbers: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

_CUDA_LABEL = re.compile(r"cu([0-9]{2})([0-9])(?![0-9])")
_ROCM_LABEL = re.compile(r"rocm([0-9]+)\.([0-9]+)")
_CUDA_RUNTIMES = re.compile(r"cuda-toolkit|nvidia-cuda-runtime(-cu[0-9]+)?")


@dataclass(frozen=True)
class Build:
    """One build of torch.

    Attributes:
        version: torch's version, with its label.
        runtime: `"cuda"`, `"rocm"`, `"cpu"`, another label's first word, or empty where that is not known.
        release: the runtime's major and minor version, as far as they are known.
    """

    version: str
    runtime: str
    release: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = {"cuda": "CUDA", "rocm": "ROCm"}
        if self.runtime not in names:
            return f"torch {self.version}"
        return f"torch {self.version} for {names[self.runtime]} {'.'.join(map(str, self.release))}".rstrip()


def installed_build() -> Build | None:
    """The torch that is installed; None where there is none."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    _, _, label = installed.partition("+")
    for runtime, pattern in (("cuda", _CUDA_LABEL), ("rocm", _ROCM_LABEL)):
        match = pattern.match(label)
        if match:
            return Build(installed, runtime, (int(match[1]), int(match[2])))
    for runtime in ("cpu", "xpu"):
        if label.startswith(runtime):
            return Build(installed, runtime)
    return _required_runtime(installed)


def minimum_driver(build: Build) -> str | None:
    """The oldest NVIDIA driver for a build; None where that is not published, or the build has no CUDA."""
    if build.runtime != "cuda" or not build.release:
        return None
    return MINIMUM_DRIVERS.get(build.release[0])


def numbers(dotted: str) -> tuple[int, ...]:
    """A driver's version for comparison: `"525.60.13"` is `(525, 60, 13)`."""
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
