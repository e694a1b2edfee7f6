"""Collectives on the NPU: hccl for its tensors, gloo beside it for the host's."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torch_npu

from accelcore.environment import Launch
from accelcore.roles.collectives import TorchCollectives

__all__ = ["NpuCollectives"]


class NpuCollectives(TorchCollectives):
    """The default group takes tensors of either kind; one that the script formed for hccl alone gets gloo beside it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "cpu:gloo,npu:hccl")
        self._host_group: dist.ProcessGroup | None = None

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        torch_npu.npu.set_device(self._device)  # hccl binds a rank to the device that is current when it starts
        super().init(launch, timeout=timeout)
        if dist.is_initialized() and self._host_group is None and "cpu:" not in dist.get_backend_config():
            self._host_group = dist.new_group(backend="gloo", timeout=timeout)

    def cpu_group(self) -> dist.ProcessGroup | None:
        return self._host_group or super().cpu_group()

    def close(self) -> None:
        if self._host_group is not None and len(self._entered) == 1:
            dist.destroy_process_group(self._host_group)
            self._host_group = None
        super().close()
