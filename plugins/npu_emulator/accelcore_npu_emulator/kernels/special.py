"""Operators of torch whose kernels are more than the host's: copies, division with a mode, coalescing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore.torch_features import GET_KERNEL
from accelcore_npu_emulator.kernels.boxing import host_kernel
from accelcore_npu_emulator.kernels.host_memory import place, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_MODES = (None, "floor", "trunc")
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def special_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name. Call it before torch_npu's are replaced."""
    aten = torch.ops.aten
    return {
        **_copy_kernels(machine),
        "aten::div.Tensor_mode": _with_mode(aten.div.Tensor_mode, machine),
        "aten::div.out_mode": _with_mode(aten.div.out_mode, machine),
        "aten::div_.Tensor_mode": _with_mode(aten.div_.Tensor_mode, machine, _divide_in_place),
    }


def _copy_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return copies within a device and between devices and host, and reads of single values."""
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


def _divide_in_place(self: Tensor, other: Tensor | float, *, rounding_mode: str | None = None) -> Tensor:
    # The device divides integers in place and truncates; torch refuses this on the host.
    return self.copy_(torch.div(self, other, rounding_mode=rounding_mode))


OPERATORS: dict[str, Callable[..., Any]] = {"div_": _divide_in_place}


def _with_mode(
    operator: torch._ops.OpOverload, machine: Machine, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    host = host_kernel(operator, machine, function)
    # torch_npu's own kernel refuses an unknown mode, with its own message and code. An old torch cannot return it: the
    # host refuses then.
    own = torch.library.get_kernel(operator, "PrivateUse1") if GET_KERNEL.present else None
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(*args: Any, rounding_mode: str | None, **kwargs: Any) -> Any:
        if rounding_mode in _MODES or own is None:
            return host(*args, rounding_mode=rounding_mode, **kwargs)
        # torch passes the number in `tensor.div_(2)` as a number.
        tensors = [value if isinstance(value, Tensor) else torch.tensor(value) for value in args]
        return own.call_boxed(keys, *tensors, rounding_mode=rounding_mode, **kwargs)

    return kernel


def coalesce_kernel(machine: Machine) -> Callable[[Tensor], Tensor]:
    """Return the kernel that sorts the elements of a sparse tensor and sums those with equal indices."""

    def coalesce(self: Tensor) -> Tensor:
        machine.count_launch("aten::_coalesce")
        machine.synchronize("aten::_coalesce")  # to get the number of elements left
        values = view(self._values())
        # Those of low precision are added up in float32, and rounded once.
        exact = values.float() if values.dtype in _LOW_PRECISION else values
        host = torch.sparse_coo_tensor(view(self._indices()), exact, self.shape, check_invariants=True).coalesce()
        indices, values = place(host._indices(), self.device), place(host._values().to(values.dtype), self.device)
        with torch.npu.device(self.device):  # type: ignore[attr-defined]  # torch_npu makes it on the current one
            return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=True, check_invariants=False)

    return coalesce
