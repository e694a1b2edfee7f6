"""CUDA runtime: one GPU of this process."""

from __future__ import annotations

from typing import Literal

import torch

from accelcore.roles.runtime import AcceleratorRuntime
from accelcore_cuda.determinism import make_deterministic
from accelcore_cuda.fork import refuse_fork

__all__ = ["CudaRuntime"]


class CudaRuntime(AcceleratorRuntime):
    """One GPU of this process. In a forked process every method raises BackendUnavailableError.

    Memory figures come from torch's allocator. They do not include the memory of other processes and of CUDA itself.
    """

    def __init__(self, device: torch.device) -> None:
        refuse_fork()
        # thread_local: a loader's thread may pin the next batch during a capture, which would break a global one.
        super().__init__(device, graph=torch.cuda.CUDAGraph, capture={"capture_error_mode": "thread_local"})

    @property
    def device(self) -> torch.device:
        refuse_fork()
        return super().device

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        if deterministic:
            make_deterministic(self.device)
        super().seed(n, deterministic=deterministic, same=same)
