"""Overflow: the float status flag of parts that saturate, and the checks that scalers make.

Ascend910A saturates: a float16 result beyond the largest number becomes that number, and nan becomes 0. Both raise a
flag, which stays until it is cleared. Ascend910B and later write inf and nan as other devices do, without the flag.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import CPU, place, tensors_in, view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelcore_npu_emulator.kernels.machine import Machine
    from accelcore_npu_emulator.settings import Settings

_LARGEST = torch.finfo(torch.float16).max
_STATUS_WORDS = 8


class FloatStatus:
    """Flag of each device, and count of overflow checks for the fault `overflow@K`."""

    def __init__(self, settings: Settings) -> None:
        import torch_npu

        # torch_npu knows the chips, and the variables that turn inf and nan off.
        self.saturates = not torch_npu._C._npu_is_support_inf_nan()
        self._raised: set[int] = set()
        self._checks = 0
        self._overflow_at = frozenset(fault.count for fault in settings.faults if fault.kind == "overflow")

    def finite(self, value: object) -> bool:
        """Return whether a tensor, a number or a list of them has no inf or nan."""
        if isinstance(value, Tensor):
            return not value.is_floating_point() or bool(torch.isfinite(value).all())
        if isinstance(value, float):
            return math.isfinite(value)
        return not isinstance(value, (list, tuple)) or all(map(self.finite, value))

    def saturate(self, results: object, device: int, *, inputs_finite: bool) -> None:
        """Saturate an operator's results and raise the flag. Inf from an input, such as a mask, does not raise it."""
        for result in tensors_in(results):
            if self.finite(result):
                continue
            if inputs_finite:
                self._raised.add(device)
            if result.dtype == torch.float16:
                result.nan_to_num_(0.0, _LARGEST, -_LARGEST)

    def raised(self, device: int) -> bool:
        """Read the flag."""
        return device in self._raised

    def clear(self, device: int) -> None:
        """Lower the flag."""
        self._raised.discard(device)

    def begin_check(self, device: int) -> bool:
        """Count one overflow check. Return whether an injected fault makes it see an overflow."""
        self._checks += 1
        faulty = self._checks in self._overflow_at
        if faulty and self.saturates:
            self._raised.add(device)
        return faulty


def overflow_kernels(machine: Machine) -> dict[str, Callable[..., Any]]:
    """Return the kernels by operator name."""
    status = machine.float_status

    def word(device: torch.device, *, raised: bool) -> Tensor:
        words = torch.zeros(_STATUS_WORDS, device=CPU)
        words[0] = float(raised)
        return place(words, device)

    def alloc_float_status(self: Tensor) -> Tensor:
        machine.count_launch("npu::npu_alloc_float_status")
        return word(self.device, raised=False)

    def get_float_status(self: Tensor, mode: int = 0) -> Tensor:
        machine.count_launch("npu::npu_get_float_status")
        status.begin_check(self.get_device())
        return word(self.device, raised=status.raised(self.get_device()))

    def clear_float_status(self: Tensor, mode: int = 0) -> Tensor:
        machine.count_launch("npu::npu_clear_float_status")
        status.clear(self.get_device())
        return word(self.device, raised=False)

    def flag_was_raised(device: int) -> bool:
        # torch_npu reads the flag, waits for it, and clears it when it was raised.
        machine.count_launch("npu::npu_get_float_status")
        machine.synchronize("npu::npu_get_float_status")
        raised = status.raised(device)
        if raised:
            machine.count_launch("npu::npu_clear_float_status")
            status.clear(device)
        return raised

    def non_finite_check(scaled_grads: Sequence[Tensor]) -> bool:
        device = scaled_grads[0].get_device() if scaled_grads else 0
        faulty = status.begin_check(device)
        if status.saturates:
            return flag_was_raised(device)
        machine.count_launch("npu::_amp_foreach_non_finite_check")
        machine.synchronize("npu::_amp_foreach_non_finite_check")
        return faulty or not status.finite([view(gradient) for gradient in scaled_grads])

    def check_and_unscale(self: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        if not self:
            return
        dtypes = {gradient.dtype for gradient in self}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise RuntimeError(f"EMULATED: gradients that are unscaled together must have the same dtype, not {names}")
        device = self[0].get_device()
        faulty = status.begin_check(device)
        if status.saturates:
            if flag_was_raised(device):
                found_inf.fill_(1.0)
                return
            for gradient in self:
                gradient.mul_(inv_scale)
            return
        gradients, found, inverse = [view(gradient) for gradient in self], view(found_inf), view(inv_scale)
        if faulty:
            struck = next((gradient for gradient in gradients if gradient.numel()), found)
            struck[(0,) * struck.dim()] = float("inf")
        machine.count_launch("aten::_amp_foreach_non_finite_check_and_unscale_")
        machine.recorder.run(lambda: torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse))

    return {
        "npu::npu_alloc_float_status": alloc_float_status,
        "npu::npu_get_float_status": get_float_status,
        "npu::npu_clear_float_status": clear_float_status,
        "npu::_amp_foreach_non_finite_check": non_finite_check,
        "aten::_amp_foreach_non_finite_check_and_unscale_": check_and_unscale,
    }
