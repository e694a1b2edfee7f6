"""Overflow: the float status flag of parts that saturate, and the checks that scalers make.

Ascend910A saturates: a float16 result beyond the largest number becomes that number, and nan becomes 0. Both raise a
flag, which stays until it is cleared. Ascend910B and later write inf and nan as other devices do, without the flag.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from accelcore_npu_emulator.kernels.host_memory import tensors_in

if TYPE_CHECKING:
    from accelcore_npu_emulator.settings import Settings

_LARGEST = torch.finfo(torch.float16).max


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
        if isinstance(value, torch.Tensor):
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
