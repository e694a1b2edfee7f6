"""Collectives on CUDA: NCCL for CUDA tensors, gloo for CPU tensors."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from accelcore.jobs.collectives import TorchCollectives
from accelcore.jobs.launchers import Launch

_DETAILED = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""torch's records of NCCL. At a timeout each rank names the missing ranks and writes its record."""

_TIMEOUT = timedelta(minutes=10)
"""torch's default for NCCL alone. For a group that also has gloo, torch would wait half an hour."""


class CudaCollectives(TorchCollectives):
    """Collectives whose default group takes CPU and CUDA tensors. A script's own group of NCCL gets gloo beside it.

    The group is not bound to the device (`device_id=`). If it were, `dist.new_group(ranks, backend="gloo")` for some
    ranks would make the others wait forever for a split of NCCL's communicator. NCCL learns the device from each
    tensor, and the barrier gets it as an argument.
    """

    waits_for_lost_ranks = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "cpu:gloo,cuda:nccl", host="gloo", detailed=_DETAILED)

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if launch is not None or dist.is_initialized():
            torch.cuda.set_device(self.device)  # otherwise all ranks of a host make a context on its first GPU
        super().init(launch, timeout=timeout or _TIMEOUT)

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier(device_ids=[self.device.index])
