"""Detection of NVIDIA GPUs and their driver by files. This module does not import torch.

It initialises no library of NVIDIA, not even NVML. `nvmlInit` is safe before a fork, but it opens the driver. Without
the persistence daemon that wakes the GPUs and may take seconds, and every `select()` probes. Files suffice, except for
the number of GPUs under WSL2. If the driver's library is in none of the usual folders, the dynamic linker is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from accelcore_cuda.visible import Fault, Hardware, visible

LIBRARY = "libcuda.so.1"
"""Library of the driver. It decides which CUDA can run, even if it is newer than the kernel module (cuda-compat)."""

_DEV = Path("/dev")
_PROC = Path("/proc/driver/nvidia")
_SYS = Path("/sys/module/nvidia")
_LINKER_CACHE = Path("/etc/ld.so.cache")
_WSL = Path("/usr/lib/wsl/lib")
_MODPROBE = Path("/usr/bin/nvidia-modprobe")
_FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/local/nvidia/lib64",  # Kubernetes' device plugin
        "/usr/local/nvidia/lib",
        "/usr/local/cuda/compat",
        "/run/opengl-driver/lib",  # NixOS
    )
)
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_UNHIDE = f"unset {_VARIABLE}, or name GPUs in it that exist, each once"
_MOST = 64  # GPUs in one machine, torch's limit


def look(environ: Mapping[str, str]) -> Hardware | Fault:
    """Return the NVIDIA GPUs that this process may use, or why there are none."""
    control = _DEV / "nvidiactl"
    if control.exists():
        present = sum(path.name[len("nvidia") :].isdigit() for path in _DEV.glob("nvidia[0-9]*"))
    elif (_DEV / "dxg").exists():
        return _look_through_windows(environ)
    elif (_PROC / "version").exists() and _MODPROBE.exists():  # with it, the first use of CUDA makes the device files
        present = sum(1 for _ in _PROC.glob("gpus/*"))
    elif (_PROC / "version").exists():  # a container sees its host's
        return (
            "the NVIDIA driver is loaded, and there is no /dev/nvidiactl",
            "run nvidia-smi as root, which makes it; a container has to be started with --gpus all",
        )
    else:
        return "no NVIDIA driver is loaded (there is no /dev/nvidiactl)", "install the NVIDIA driver for your GPU"
    if not present:
        return "the NVIDIA driver is loaded, but it shows no GPU", "see the output of nvidia-smi"
    if control.exists() and not os.access(control, os.R_OK | os.W_OK):
        return "this user may not open /dev/nvidiactl", "see its owner and mode, and join the group that may"
    library = _find_library(environ)
    if library is None and not _links():
        return (
            f"there is an NVIDIA GPU, and the driver's {LIBRARY} is not found",
            "install the driver's CUDA library, or start the container with --gpus all",
        )
    seen = visible(_VARIABLE, environ.get(_VARIABLE), present, _uuids())
    if not seen.count:
        return seen.note, _UNHIDE
    of_library, of_kernel = _version_of(library) if library else None, _kernel_version()
    driver = of_library or of_kernel
    notes = [seen.note] if seen.note else []
    if of_library and of_kernel and of_library != of_kernel:
        notes.append(f"{LIBRARY} is of driver {of_library}, the kernel module of {of_kernel}")
    words = f"{_count(seen.count)}, driver {driver or 'of unknown version'}"
    return Hardware(words, seen.count, driver, notes=tuple(notes))


def _look_through_windows(environ: Mapping[str, str]) -> Hardware | Fault:
    """Check WSL2, which uses the driver of Windows and whose device file does not list GPUs."""
    if not (_WSL / LIBRARY).exists():
        return (
            f"no NVIDIA driver is loaded (this is WSL2, and Windows brings no {_WSL / LIBRARY})",
            "install the NVIDIA driver in Windows, not in Linux",
        )
    value = environ.get(_VARIABLE)
    seen = visible(_VARIABLE, value, 1 if value is None else _MOST)
    if not seen.count:
        return seen.note, _UNHIDE
    assumed = "" if value is not None else f"; if there are several, name them in {_VARIABLE}"
    words = f"{_count(seen.count)} of WSL2, driver of unknown version{assumed}"
    return Hardware(words, seen.count, notes=(seen.note,) if seen.note else ())


def _count(gpus: int) -> str:
    return "1 NVIDIA GPU" if gpus == 1 else f"{gpus} NVIDIA GPUs"


def _find_library(environ: Mapping[str, str]) -> Path | None:
    """Return the file that the dynamic linker would load, or None if it is in none of the usual places."""
    folders = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    candidates = [*(folder / LIBRARY for folder in folders), *_cached(), *(folder / LIBRARY for folder in _FOLDERS)]
    return next((path for path in candidates if path.exists()), None)


def _links() -> bool:
    """Return whether the dynamic linker finds the library. Loading it opens no device: `cuInit` does."""
    import ctypes  # not for every probe

    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def _cached() -> list[Path]:
    try:
        cache = _LINKER_CACHE.read_bytes()
    except OSError:
        return []
    return [Path(os.fsdecode(path)) for path in re.findall(rb"\0(/[^\0]+/libcuda\.so\.1)(?=\0)", cache)]


def _version_of(library: Path) -> str | None:
    """Return the driver's version from the name of the linked file: `libcuda.so.580.65.06`."""
    match = re.fullmatch(r"libcuda\.so\.([0-9]{3,}\.[0-9]+(?:\.[0-9]+)*)", library.resolve().name)
    return match[1] if match else None


def _kernel_version() -> str | None:
    match = re.search(r"NVRM version:.*?\s([0-9]{3,}\.[0-9]+(?:\.[0-9]+)*)\s", _read(_PROC / "version"))
    text = match[1] if match else _read(_SYS / "version").strip()
    return text if re.fullmatch(r"[0-9]+(\.[0-9]+)+", text) else None


def _uuids() -> list[str] | None:
    """Return the UUIDs of all GPUs in bus order; None if the driver hides them from this process."""
    found = []
    for path in sorted(_PROC.glob("gpus/*/information")):
        match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", _read(path), re.MULTILINE)
        if match is None:  # question marks, until the driver has read it
            return None
        found.append(match[1])
    return found or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
