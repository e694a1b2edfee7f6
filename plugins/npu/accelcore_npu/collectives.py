"""Collectives on the NPU: hccl for NPU tensors, gloo for CPU tensors."""

from __future__ import annotations

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch_npu

from accelcore.errors import ConfigurationError, logger
from accelcore.jobs.collectives import TorchCollectives
from accelcore.jobs.launchers import Launch

_EXEC_TIMEOUT = "HCCL_EXEC_TIMEOUT"
"""Seconds that a collective of hccl may wait. hccl reads it when it connects ranks; it never reads torch's timeout."""

_RECORDS = {"TORCH_FR_BUFFER_SIZE": "16"}  # torch's flight recorder, for collectives over gloo

_DETAILED = {
    "TORCH_HCCL_DESYNC_DEBUG": "1",
    "TORCH_HCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_HCCL_DUMP_ON_TIMEOUT": "1",
}
"""torch_npu's records of hccl. At a timeout each rank names the missing ranks and writes its record."""


class NpuCollectives(TorchCollectives):
    """Collectives whose default group takes CPU and NPU tensors. A script's own group of hccl gets gloo beside it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, "cpu:gloo,npu:hccl", host="gloo", records=_RECORDS, detailed=_DETAILED)
        self._sets_timeout = False

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        torch_npu.npu.set_device(self.device)  # hccl binds a rank to the device that is current when it starts
        if launch is not None and not dist.is_initialized():
            self._limit(timeout)
        try:
            super().init(launch, timeout=timeout)
        except BaseException:
            self._lift_limit()
            raise

    def close(self) -> None:
        super().close()
        self._lift_limit()

    def _limit(self, timeout: timedelta | None) -> None:
        """Set hccl's timeout to `timeout`, unless the user set HCCL_EXEC_TIMEOUT."""
        own = os.environ.get(_EXEC_TIMEOUT)
        if own is not None and not (own.isascii() and own.isdigit()):
            raise ConfigurationError(
                f"{_EXEC_TIMEOUT}={own!a} is not a number of seconds",
                remedy="give a whole number, 0 for no limit; or unset it, and use accel.distributed(timeout=...)",
            )
        if timeout is None:
            return
        limit = timeout.total_seconds()
        # Below torch's timeout, which ends the process and names no rank. 0 would mean no limit.
        seconds = max(1, math.ceil(limit) - 1)
        if own is None:
            os.environ[_EXEC_TIMEOUT], self._sets_timeout = str(seconds), True
        elif not seconds <= int(own) <= limit:
            logger.warning(
                "hccl waits up to %s s because of %s, not timeout=%s; unset it to use timeout=",
                own,
                _EXEC_TIMEOUT,
                timeout,
            )

    def _lift_limit(self) -> None:
        if self._sets_timeout and not dist.is_initialized():
            os.environ.pop(_EXEC_TIMEOUT, None)
            self._sets_timeout = False
