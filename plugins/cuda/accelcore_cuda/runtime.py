"""A GPU as a device: its queue, its random numbers, its memory, and the process it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
from torch import Tensor

from accelcore.roles.accelerator import AcceleratorRuntime
from accelcore.roles.runtime import Memory
from accelcore_cuda.determinism import make_deterministic
from accelcore_cuda.fork import refuse_fork

__all__ = ["CudaRuntime"]

T = TypeVar("T")


class CudaRuntime(AcceleratorRuntime):
    """One GPU of this process. In a forked process each of its methods raises BackendUnavailableError.

    Memory figures are those of torch's allocator, which reading does not disturb: what other processes hold, and what
    CUDA itself takes, is not in them.
    """

    def __init__(self, device: torch.device) -> None:
        refuse_fork()
        # thread_local: a loader's thread may pin the next batch meanwhile, which would spoil a global capture.
        super().__init__(device, graph=torch.cuda.CUDAGraph, capture={"capture_error_mode": "thread_local"})

    def synchronize(self) -> None:
        refuse_fork()
        torch.cuda.synchronize(self.device)

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        refuse_fork()
        if deterministic:
            make_deterministic(self.device)
        super().seed(n, deterministic=deterministic, same=same)

    def tune(self) -> None:
        """As in the role, by cuDNN's benchmark; nothing where deterministic results were asked for."""
        refuse_fork()
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()

    def rng_state(self) -> dict[str, Tensor]:
        refuse_fork()
        return super().rng_state()

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        refuse_fork()
        return super().set_rng_state(state)

    def memory(self) -> Memory:
        refuse_fork()
        return super().memory()

    def to_device(self, batch: T) -> T:
        refuse_fork()
        return super().to_device(batch)

    def prefetch(self, batch: T) -> Callable[[], T]:
        refuse_fork()
        return super().prefetch(batch)

    def side_stream(self) -> AbstractContextManager[object]:
        refuse_fork()
        return super().side_stream()

    def pin(self, tensor: Tensor) -> Tensor:
        refuse_fork()
        # torch pins for the current device, and would make a context on GPU 0 for the sake of another.
        with torch.cuda.device(self.device):
            return super().pin(tensor)

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        refuse_fork()
        return super().capture(work)
