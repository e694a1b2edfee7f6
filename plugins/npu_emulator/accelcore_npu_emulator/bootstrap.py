"""Emulate the NPU in this process and its children.

As with a real CANN, the environment is enough. The loader finds the emulated libraries in LD_LIBRARY_PATH. They call
`answer` here (by `cann/python.cpp`): for the settings (`machine`), and to register the host kernels (`start`).
Without import hooks or sitecustomize, emulation reaches every child that inherits the environment.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

from accelcore_npu.detection import cuda_build

from accelcore.devices.plugins import autoload_enabled, without_autoload
from accelcore.errors import AccelError, BackendUnavailableError, ConfigurationError
from accelcore_npu_emulator import build, native, wheel
from accelcore_npu_emulator.settings import Settings


def environment(settings: Settings | None = None) -> dict[str, str]:
    """Return the environment variables that a launcher sets for an emulated process. Compile the emulator if needed."""
    return _variables(settings, build.libraries())


def activate(settings: Settings | None = None) -> None:
    """Emulate the NPU in this process and in the children that get its environment. Call it before torch_npu loads.

    Without CANN, call it before `import torch`, which loads torch_npu. If torch is built for CUDA, this function
    imports both of them. A second call changes nothing.

    Args:
        settings: the machine to emulate; what ACCEL_EMULATED_* say if None.

    Raises:
        BackendUnavailableError: torch_npu has loaded another CANN, or the emulator cannot be built.
        ConfigurationError: a setting is invalid, or differs from the settings already in force.
    """
    if active():
        if settings not in (None, Settings.from_environment()):
            raise ConfigurationError(
                "the NPU is emulated already, with other settings",
                available=str(Settings.from_environment()),
                remedy="give each machine a process of its own",
            )
        return
    if "torch_npu" in sys.modules:
        raise BackendUnavailableError(
            "the NPU cannot be emulated in this process",
            why="torch_npu is imported already, and has loaded a CANN that is not the emulator's",
            remedy="call activate() before the first import of torch or torch_npu",
        )
    folder = build.libraries()
    variables = _variables(settings, folder)
    import_early = "torch" not in sys.modules and cuda_build()
    if import_early:
        with without_autoload():  # the emulated CANN has to be loaded before torch_npu (allocator_options.cpp)
            import_module("torch")
    for name in build.LIBRARIES:  # the loader finds a loaded library by its soname, in any folder
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    if native.opened() is None:
        raise BackendUnavailableError(
            "the NPU cannot be emulated in this process",
            why="another libascendcl.so is loaded already",
            remedy="call activate() before any other code loads CANN",
        )
    os.environ.update(variables)
    if entry := wheel.path_entry():
        sys.path.append(entry)
    if import_early and autoload_enabled(os.environ):
        import_module("torch_npu")


def active() -> bool:
    """Return whether this process uses the emulated CANN: loaded already, or by ACCEL_EMULATE when torch_npu loads."""
    return native.opened(load=os.environ.get("ACCEL_EMULATE") == "npu") is not None


def _variables(settings: Settings | None, folder: Path) -> dict[str, str]:
    settings = Settings.from_environment() if settings is None else settings
    path = [str(folder), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))]
    home = folder / "cann"
    modules = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), wheel.path_entry()]
    return {
        "ACCEL_EMULATE": "npu",
        **settings.variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys(path)),
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        # Operators run when they are called, on the thread that calls them.
        "TASK_QUEUE_ENABLE": "0",
    }


def start() -> str:
    """Register the host kernels for `aclInit`. Return the error as a string, or an empty one; never raise."""
    try:
        library = native.opened()
        if library is None:
            return "libascendcl.so is not the emulator's"
        settings = Settings.from_environment()
        _check_ranks(settings)
        kernels = import_module("accelcore_npu_emulator.kernels")
        kernels.install(library, settings)
    except AccelError as error:
        return f"the host kernels cannot be registered: {error}"
    except Exception as error:  # noqa: BLE001  # the caller is C++
        traceback.print_exc()
        return f"the host kernels cannot be registered: {error}"
    return ""


def machine() -> str:
    """Return the settings as words for `python.cpp`, or the error in the ACCEL_EMULATED_ variables; never raise."""
    try:
        settings = Settings.from_environment()
    except AccelError as error:
        return str(error)
    faults = {fault.kind: fault for fault in settings.faults}
    counts = [faults[kind].count if kind in faults else 0 for kind in ("out_of_memory", "timeout", "die")]
    rank = faults["die"].rank if "die" in faults else -1
    words = settings.devices, settings.memory, int(settings.poison), *counts, rank, settings.soc
    return " ".join(map(str, words))


def answer(function: str, address: int, size: int) -> None:
    """Write the string that a function of this module returns into memory of `python.cpp`."""
    text = globals()[function]().encode()[: size - 1] + b"\0"
    ctypes.memmove(address, text, len(text))


def _check_ranks(settings: Settings) -> None:
    """Refuse a fault for a rank that does not exist: the run would pass without the fault."""
    size = os.environ.get("WORLD_SIZE") or ("1" if multiprocessing.parent_process() is None else "")
    for fault in settings.faults:
        if fault.kind == "die" and size.isdecimal() and fault.rank >= int(size):
            raise ConfigurationError(
                f"the fault {fault} strikes no rank",
                why=f"the ranks of this job are 0 to {int(size) - 1}",
                remedy="name one of them in ACCEL_EMULATED_FAULTS, or start more ranks: accelcore run --nproc N",
            )
