"""Host kernels of the emulated NPU: torch's CPU kernels on the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore_npu_emulator.kernels.machine import Machine
from accelcore_npu_emulator.kernels.registry import register
from accelcore_npu_emulator.kernels.single_operators import single_operator_handler

if TYPE_CHECKING:
    from accelcore_npu_emulator.native import Native

_installed: list[object] = []


def install(native: Native) -> None:
    """Register every host kernel, once in a process; torch_npu must be imported."""
    if _installed:
        return
    machine = Machine(native)
    _installed.extend(register(machine))
    native.set_operator_handler(single_operator_handler(machine))
    native.set_graph_handler(machine.recorder.handle)
