"""Sparse tensors: torch_npu computes with their indices and values, and calls one CANN operator on both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.host_memory import place, view

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcore_npu_emulator.kernels.machine import Machine

_NAME = "aten::_coalesce"
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def coalesce_kernel(machine: Machine) -> Callable[[Tensor], Tensor]:
    """Return the kernel that sorts the elements of a sparse tensor and sums those with equal indices."""

    def coalesce(self: Tensor) -> Tensor:
        machine.count_launch(_NAME)
        machine.synchronize(_NAME)  # to get the number of elements left
        values = view(self._values())
        # Those of low precision are added up in float32, and rounded once.
        exact = values.float() if values.dtype in _LOW_PRECISION else values
        host = torch.sparse_coo_tensor(view(self._indices()), exact, self.shape, check_invariants=True).coalesce()
        indices, values = place(host._indices(), self.device), place(host._values().to(values.dtype), self.device)
        with torch.npu.device(self.device):  # type: ignore[attr-defined]  # torch_npu makes it on the current one
            return torch.sparse_coo_tensor(indices, values, self.shape, is_coalesced=True, check_invariants=False)

    return coalesce
