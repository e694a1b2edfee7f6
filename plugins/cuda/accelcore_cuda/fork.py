"""CUDA and fork: a process that was forked from one which had initialised CUDA cannot use it."""

from __future__ import annotations

import torch

from accelcore.errors import BackendUnavailableError

__all__ = ["refuse_fork"]


def refuse_fork() -> None:
    """Raise BackendUnavailableError in a process that was forked from one which already used CUDA."""
    if torch.cuda._is_in_bad_fork():
        raise BackendUnavailableError(
            "cuda cannot be used in this process",
            why="it was forked from one that already used CUDA, which does not survive a fork",
            remedy="start processes with multiprocessing's 'spawn' method, and leave the GPU out of what loader "
            "workers do",
        )
