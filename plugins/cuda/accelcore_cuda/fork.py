"""Check for forked processes: CUDA cannot be used in a fork of a process that initialised it."""

from __future__ import annotations

import torch

from accelcore.errors import BackendUnavailableError

__all__ = ["refuse_fork"]


def refuse_fork() -> None:
    """Raise BackendUnavailableError if this process was forked from one that used CUDA."""
    if torch.cuda._is_in_bad_fork():
        raise BackendUnavailableError(
            "CUDA cannot be used in this process",
            why="it was forked from a process that used CUDA, and CUDA does not survive a fork",
            remedy="start processes with multiprocessing's 'spawn' method, and do not use the GPU in loader workers",
        )
