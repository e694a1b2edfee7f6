"""CUDA runtime: one GPU of this process, which does not survive a fork, and its deterministic results."""

from __future__ import annotations

import os
from typing import Literal

import torch

from accelcore.errors import BackendUnavailableError, ConfigurationError, logger
from accelcore.roles.runtime import AcceleratorRuntime
from accelcore.util.text import shown

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")


class CudaRuntime(AcceleratorRuntime):
    """One GPU of this process. In a forked process every method raises BackendUnavailableError.

    Memory figures come from torch's allocator. They do not include the memory of other processes and of CUDA itself.
    """

    def __init__(self, device: torch.device) -> None:
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


def refuse_fork() -> None:
    """Raise BackendUnavailableError if this process was forked from one that used CUDA."""
    if torch.cuda._is_in_bad_fork():
        raise BackendUnavailableError(
            "CUDA cannot be used in this process",
            why="it was forked from a process that used CUDA, and CUDA does not survive a fork",
            remedy="start processes with multiprocessing's 'spawn' method, and do not use the GPU in loader workers",
        )


def make_deterministic(device: torch.device) -> None:
    """Make cuDNN and cuBLAS deterministic for the rest of the process.

    cuBLAS and torch read CUBLAS_WORKSPACE_CONFIG once, at the first matrix product. It is not known if one ran already,
    unless the device has never held a tensor. Otherwise a warning is logged.
    """
    value = os.environ.get(_VARIABLE)
    if value is None:
        os.environ[_VARIABLE] = _DETERMINISTIC[0]
        if torch.cuda.memory_stats(device).get("allocation.all.allocated", 0):
            logger.warning(
                "%s=%s was set after the device was used: if a matrix product already ran, torch refuses later ones; "
                "seed before the first, or set the variable before the script starts",
                _VARIABLE,
                _DETERMINISTIC[0],
            )
    elif value not in _DETERMINISTIC:
        raise ConfigurationError(
            f"{_VARIABLE}={shown(value)} does not give deterministic results",
            available=", ".join(_DETERMINISTIC),
            remedy="set it to one of these, or unset it",
        )
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
