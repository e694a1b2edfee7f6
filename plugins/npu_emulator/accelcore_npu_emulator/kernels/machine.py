"""What every kernel shares: the native half with its counters, the tape of a capture, random numbers, float status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore_npu_emulator.kernels.float_status import FloatStatus
from accelcore_npu_emulator.kernels.generators import Generators
from accelcore_npu_emulator.kernels.graph import Recorder

if TYPE_CHECKING:
    from accelcore_npu_emulator.native import Native

__all__ = ["Machine"]


class Machine:
    """One process's emulated devices, as its kernels see them."""

    def __init__(self, native: Native) -> None:
        self.settings = native.settings
        self.count_launch = native.count_launch
        self.count_synchronize = native.count_synchronize
        self.count_copy = native.count_copy
        self.recorder = Recorder()
        self.generators = Generators(self.recorder)
        self.float_status = FloatStatus(native.settings)
