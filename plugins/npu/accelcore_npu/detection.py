"""Detection of Ascend NPUs by device files, environment and metadata. This module does not import torch.

It imports, loads and initialises nothing, so the process may still fork afterwards.

The emulator is a separate distribution, and this module imports nothing of it. Its CANN is loaded like a real one. It
is known by the function `accelcore_emulated_devices`, which returns the number of devices.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from accelcore.devices.hookspecs import Probe
from accelcore.devices.plugins import autoload_enabled, autoloads, how_to_install
from accelcore.util.text import shown
from accelcore_npu import compatibility, libraries

_DEVICES = Path("/dev")
_ENVIRONMENT = (
    "ACCEL_EMULATE",
    "ACCEL_NPU_FALLBACK",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_HOME_PATH",
    "ASCEND_OPP_PATH",
    "LD_LIBRARY_PATH",
)
_DISTRIBUTIONS = ("torch-npu",)
_EMULATOR = "accelcore-npu-emulator"
_TRANSFER = "torch_npu.contrib.transfer_to_npu"


def detect() -> Probe:
    """Return the plugin's probe."""
    wish = os.environ.get("ACCEL_EMULATE")
    if wish and not _wants_emulation():  # empty is unset
        return _probe(f"ACCEL_EMULATE={shown(wish)} is not a device that can be emulated", "set it to npu, or unset it")
    found = list(_package_faults())
    if _wants_emulation():
        return _detect_emulated(found)
    present = sum(path.name[len("davinci") :].isdigit() for path in _DEVICES.glob("davinci[0-9]*"))
    visible, fault = _visible(present)
    if fault is not None:
        # A machine without an NPU lacks CANN, too. Report broken packages only if torch-npu is installed.
        found = [fault, *(found if installed_version("torch-npu") else ())]
    if not found or installed_version("torch-npu"):
        found += filter(None, [libraries.cann_fault(os.environ)])
    found += _other_accelerator()
    if found:
        reasons, remedies = zip(*found, strict=True)
        return _probe("; ".join(reasons), "; ".join(dict.fromkeys(remedies)), absent=not present)
    return _probe("; ".join([_works(visible), *_notices()]), count=visible)


def emulated_devices() -> int | None:
    """Return the number of NPUs that this process's CANN imitates.

    The number is 0 if the emulator refuses its settings, and None if the CANN is not emulated. A library that is not
    loaded yet is loaded only if the user asked for an emulated NPU: the search path should then lead to one.
    """
    import ctypes  # slow to import, compared with a probe

    mode = os.RTLD_NOW if _wants_emulation() else os.RTLD_NOW | os.RTLD_NOLOAD
    try:
        library = ctypes.CDLL("libascendcl.so", mode=mode)
        return int(library.accelcore_emulated_devices())
    except (OSError, AttributeError):  # the library or the function does not exist
        return None


def _wants_emulation() -> bool:
    return os.environ.get("ACCEL_EMULATE") == "npu"


def _detect_emulated(found: list[tuple[str, str]]) -> Probe:
    devices = emulated_devices()
    visible, fault = _visible(devices or 0)
    if not devices:
        found = [_emulated_fault(devices)]
    elif fault is not None:
        found = [*found, fault]
    if found:
        reasons, remedies = zip(*found, strict=True)
        return _probe(f"EMULATED: {'; '.join(reasons)}", "; ".join(remedies))
    return _probe("; ".join([f"EMULATED: {_count(visible)} imitated on the host", *_transfer()]), count=visible)


def _emulated_fault(devices: int | None) -> tuple[str, str]:
    start = "start with accelcore run --emulate npu, which sets every variable"
    if devices is not None:
        return "an environment variable ACCEL_EMULATED_... has an invalid value", f"{start} and names the invalid one"
    if installed_version(_EMULATOR) is None:
        return (
            f"ACCEL_EMULATE=npu is set, and {_EMULATOR} is not installed",
            f"{how_to_install(_EMULATOR)}; and {start}",
        )
    return "ACCEL_EMULATE=npu is set, and the emulated CANN is not in LD_LIBRARY_PATH", start


def _probe(reason: str, remedy: str = "", count: int = 0, *, absent: bool = False) -> Probe:
    return Probe(
        "npu",
        available=not remedy,
        reason=reason,
        remedy=remedy,
        priority=100,
        count=count,
        api=1,
        visible_devices="ASCEND_RT_VISIBLE_DEVICES",
        slurm="npu",
        kubernetes="huawei.com/Ascend910",
        ray="NPU",
        # The emulator checks the names of its variables.
        environment=(*_ENVIRONMENT, *sorted(name for name in os.environ if name.startswith("ACCEL_EMULATED_"))),
        distributions=_DISTRIBUTIONS,
        absent=absent,
    )


def _visible(present: int) -> tuple[int, tuple[str, str] | None]:
    """Return the number of devices that this process may use, and the fault if it is 0."""
    if not present:
        return 0, (
            "there is no Ascend NPU (no /dev/davinci*)",
            "if there is an NPU, install its driver; npu-smi info shows it",
        )
    value = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if value is None:
        return present, None
    name = f"ASCEND_RT_VISIBLE_DEVICES={shown(value)}"
    remedy = "unset it, or name devices by number, ascending and separated by commas: 0,1"
    if not value.strip():
        return 0, (f"{name} hides every NPU", remedy)
    # CANN silently ignores the list from the first invalid entry on.
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", value, re.ASCII):
        return 0, (f"{name} is not a list of device numbers", remedy)
    numbers = [int(number) for number in value.split(",")]
    if numbers != sorted(set(numbers)):
        return 0, (f"{name} is not in ascending order", remedy)
    if numbers[-1] >= present:
        return 0, (f"{name} names device {numbers[-1]}, and there are {present}, counted from 0", remedy)
    return len(numbers), None


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _package_faults() -> Iterator[tuple[str, str]]:
    """Yield the faults of torch and torch-npu, missing or not fitting, each with its remedy."""
    torch, torch_npu = installed_version("torch"), installed_version("torch-npu")
    cann = libraries.cann_version(os.environ)
    if torch is None:
        yield "torch is not installed", "pip install torch"
    elif torch_npu is None:
        wanted = compatibility.release_for(torch, cann)
        yield "torch-npu is not installed", f"pip install 'torch-npu=={wanted}', which fits torch {torch}"
    elif fault := compatibility.fault(torch, torch_npu, cann):
        yield fault


def _other_accelerator() -> Iterator[tuple[str, str]]:
    """Report a working GPU: torch has one accelerator a process, and torch_npu refuses to be imported beside a GPU."""
    if cuda_build() and (_DEVICES / "nvidiactl").exists() and installed_version("torch-npu"):
        reason = (
            f"torch {installed_version('torch')} is built for CUDA, there is an NVIDIA GPU, and torch_npu refuses both"
        )
        yield reason, "install the CPU build of torch beside torch-npu, or use cuda here"


def cuda_build() -> bool:
    """Return whether the installed torch is built for CUDA."""
    torch = installed_version("torch")
    return torch is not None and compatibility.built_for_cuda(torch, requires("torch") or ())


def _works(visible: int) -> str:
    torch_npu = installed_version("torch-npu")
    cann = libraries.cann_version(os.environ) or "of unknown version"
    return f"{_count(visible)}, torch-npu {torch_npu}, CANN {cann}"


def _count(devices: int) -> str:
    return "1 Ascend NPU" if devices == 1 else f"{devices} Ascend NPUs"


def _notices() -> Iterator[str]:
    """Yield notes that do not prevent the use of NPUs."""
    torch_npu = installed_version("torch-npu")
    released = compatibility.cann_of(torch_npu) if torch_npu else None
    cann = libraries.cann_version(os.environ)
    if released and cann and released != cann:
        yield f"torch-npu {torch_npu} was released for CANN {released}"
    if cuda_build():
        yield f"torch {installed_version('torch')} is built for CUDA, which it cannot use beside torch-npu"
    others = {autoload.distribution for autoload in autoloads() if autoload.package != "torch_npu"}
    if others and autoload_enabled(os.environ):
        yield f"torch also loads {', '.join(sorted(others))}: one process has one accelerator"
    yield from _transfer()


def _transfer() -> Iterator[str]:
    if _TRANSFER in sys.modules:
        yield "transfer_to_npu is active: torch.cuda is torch.npu in this process"
