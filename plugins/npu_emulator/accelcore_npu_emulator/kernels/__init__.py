"""Host kernels of the emulated NPU: torch's CPU kernels on the same memory.

Begin with `registry` (which kernel an operator gets) and `boxing` (the generic one). Files with a table `OPERATORS`
hold functions of host tensors, which `boxing` calls. `special`, `overflow` and the fused steps of `optimizers` are
kernels of their own. What all kernels share is in `machine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcore_npu_emulator.kernels.machine import Machine
from accelcore_npu_emulator.kernels.registry import register
from accelcore_npu_emulator.kernels.single_operators import single_operator_handler
from accelcore_npu_emulator.native import set_handlers

if TYPE_CHECKING:
    from ctypes import CDLL

    from accelcore_npu_emulator.settings import Settings

_installed: list[object] = []


def install(library: CDLL, settings: Settings) -> None:
    """Register every host kernel, once in a process; torch_npu must be imported."""
    if _installed:
        return
    machine = Machine(library, settings)
    _installed.extend(register(machine))
    set_handlers(library, single_operator_handler(machine), machine.recorder.handle)
