"""Copies within a device and between devices and host, and reads of single values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import view

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine


def copy_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name."""
    import torch_npu

    def move(target: Tensor, source: Tensor, non_blocking: bool, name: str) -> None:
        to, of = view(target), view(source)
        if target.is_cpu or source.is_cpu:
            host, direction = (target, "device to host") if target.is_cpu else (source, "host to device")
            if target.is_cpu:
                # Only memory that torch_npu has described can be read; of any other, it says so here.
                torch_npu.get_npu_format(source)
            machine.count_copy(direction, target.numel() * target.element_size())
            if not (non_blocking and host.is_pinned()):
                machine.synchronize(direction)
        else:
            machine.count_launch(name)
        machine.recorder.run(lambda: to.copy_(of))
        if machine.float_status.saturates and not target.is_cpu:
            finite = machine.float_status.finite([of])
            machine.float_status.saturate([to], target.get_device(), inputs_finite=finite)

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        move(self, src, non_blocking, "aten::copy_")
        return self

    def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
        move(dst, self, non_blocking, "aten::copy_")
        return dst

    def local_scalar_dense(self: Tensor) -> Any:
        machine.synchronize("aten::_local_scalar_dense")
        return view(self).item()

    return {
        "aten::copy_": copy_,
        "aten::_copy_from": copy_from,
        "aten::_local_scalar_dense": local_scalar_dense,
    }
