"""CUDA runtime: one GPU of this process."""

from __future__ import annotations

from typing import Literal

import torch

from accelcore.roles.runtime import AcceleratorRuntime
from accelcore_cuda.determinism import make_deterministic
from accelcore_cuda.fork import refuse_fork

__all__ = ["CudaRuntime"]


class CudaRuntime(AcceleratorRuntime):
    """One GPU of this process. In a forked process each of its methods raises BackendUnavailableError.

    Memory figures are those of torch's allocator, which reading does not disturb. They do not contain the memory of
    other processes and of CUDA itself.
    """

    def __init__(self, device: torch.device) -> None:
        refuse_fork()
        # thread_local: a loader's thread may pin the next batch meanwhile, which would spoil a global capture.
        super().__init__(device, graph=torch.cuda.CUDAGraph, capture={"capture_error_mode": "thread_local"})

    @property
    def device(self) -> torch.device:
        refuse_fork()
        return super().device

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        if deterministic:
            make_deterministic(self.device)
        super().seed(n, deterministic=deterministic, same=same)
