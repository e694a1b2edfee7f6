"""State that all kernels share: counters, the tape of a capture, random numbers, float status."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch._C._autograd import _profiler_enabled

from accelcore_npu_emulator.kernels.generators import Generators
from accelcore_npu_emulator.kernels.graph import Recorder
from accelcore_npu_emulator.kernels.overflow import FloatStatus

if TYPE_CHECKING:
    from accelcore_npu_emulator.native import Native

_WARN, _ERROR = 1, 2  # of torch_npu's set_sync_debug_mode


class Machine:
    """Emulated devices of one process, for its kernels."""

    def __init__(self, native: Native) -> None:
        import torch_npu

        self.settings = native.settings
        self._count_launch = native.count_launch
        self.count_copy = native.count_copy
        self._count_synchronize = native.count_synchronize
        self.recorder = Recorder()
        self.generators = Generators(self.recorder)
        self.float_status = FloatStatus(native.settings)
        self._looks_for_unsafe_memory = torch_npu._C._get_npu_data_unsafe_flag
        self._profiler_was_seen = False

    def count_launch(self, name: str) -> None:
        """Count one operator on the device; an active profiler records only the host's work."""
        self._count_launch(name)
        if self._looks_for_unsafe_memory():
            raise RuntimeError(
                f"EMULATED: recovery from memory errors is not emulated; turn it off (npu operator {name})"
            )
        if not self._profiler_was_seen and _profiler_enabled():
            self._profiler_was_seen = True
            warnings.warn("EMULATED: torch.profiler records the host; a device's times are not emulated", stacklevel=2)

    def synchronize(self, what: str) -> None:
        """Count one wait of the host for the device. Refuse it in a capture; obey torch_npu's sync debug mode."""
        import torch_npu

        if self.recorder.tape is not None:
            raise RuntimeError(
                f"EMULATED: the host cannot wait for {what} while a graph is being captured; do it after that"
            )
        self._count_synchronize(what)
        mode = torch_npu._C._npu_get_sync_debug_mode()
        if mode == _ERROR:
            raise RuntimeError(f"called a synchronizing NPU operation (EMULATED: {what})")
        if mode == _WARN:
            warnings.warn(f"called a synchronizing NPU operation (EMULATED: {what})", stacklevel=2)
