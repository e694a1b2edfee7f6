"""State that all kernels share: counters, the tape of a capture, random numbers, float status."""

from __future__ import annotations

import warnings
from ctypes import c_uint64
from typing import TYPE_CHECKING

from torch._C._autograd import _profiler_enabled

from accelcore_npu_emulator.kernels.generators import Generators
from accelcore_npu_emulator.kernels.graph import Recorder
from accelcore_npu_emulator.kernels.overflow import FloatStatus

if TYPE_CHECKING:
    from ctypes import CDLL

    from accelcore_npu_emulator.settings import Settings

_WARN, _ERROR = 1, 2  # of torch_npu's set_sync_debug_mode


class Machine:
    """Emulated devices of one process, for its kernels."""

    def __init__(self, library: CDLL, settings: Settings) -> None:
        import torch_npu

        self.settings = settings
        self._library = library  # the emulator's libascendcl
        self.recorder = Recorder()
        self.generators = Generators(self.recorder)
        self.float_status = FloatStatus(settings)
        self._looks_for_unsafe_memory = torch_npu._C._get_npu_data_unsafe_flag
        self._profiler_was_seen = False

    def count_launch(self, name: str) -> None:
        """Count one operator on the device; an active profiler records only the host's work."""
        if not self._library.emulator_count_launch(name.encode()):
            raise _forked()
        if self._looks_for_unsafe_memory():
            raise RuntimeError(
                f"EMULATED: recovery from memory errors is not emulated; turn it off (npu operator {name})"
            )
        if not self._profiler_was_seen and _profiler_enabled():
            self._profiler_was_seen = True
            warnings.warn("EMULATED: torch.profiler records the host; a device's times are not emulated", stacklevel=2)

    def count_copy(self, direction: str, size: int) -> None:
        """Count one copy; `direction` is `"host to device"`, `"device to host"` or `"device to device"`."""
        if not self._library.emulator_count_copy(direction.encode(), c_uint64(size)):
            raise _forked()

    def synchronize(self, what: str) -> None:
        """Count one wait of the host for the device. Refuse it in a capture; obey torch_npu's sync debug mode."""
        import torch_npu

        if self.recorder.tape is not None:
            raise RuntimeError(
                f"EMULATED: the host cannot wait for {what} while a graph is being captured; do it after that"
            )
        if not self._library.emulator_count_synchronize(what.encode()):
            raise _forked()
        mode = torch_npu._C._npu_get_sync_debug_mode()
        if mode == _ERROR:
            raise RuntimeError(f"called a synchronizing NPU operation (EMULATED: {what})")
        if mode == _WARN:
            warnings.warn(f"called a synchronizing NPU operation (EMULATED: {what})", stacklevel=2)


def _forked() -> RuntimeError:
    return RuntimeError(
        "EMULATED: this process was forked from one that had initialised the NPU, and cannot use it; start it with the "
        "'spawn' method"
    )
