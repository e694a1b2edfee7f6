"""Collectives on CUDA: NCCL for its tensors, gloo beside it for the host's."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from accelcore.jobs.collectives import TorchCollectives
from accelcore.jobs.launchers import Launch

__all__ = ["CudaCollectives"]

_DETAILED = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""torch's own, of what goes by NCCL: at a timeout each rank says which ranks did not come, and writes its record."""


class CudaCollectives(TorchCollectives):
    """The default group takes tensors of either kind; one that the script formed for NCCL alone gets gloo beside it.

    The group is not bound to the device (`device_id=`): with one that is, `dist.new_group(ranks, backend="gloo")` of
    some of the ranks makes the others wait for a split of NCCL's communicator that never comes. NCCL learns the device
    from each tensor, and the barrier is told.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "cpu:gloo,cuda:nccl", host="gloo", detailed=_DETAILED)

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if launch is not None or dist.is_initialized():
            torch.cuda.set_device(self.device)  # or ranks that share a host all make a context on its first GPU
        super().init(launch, timeout=timeout)

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.device.index])
