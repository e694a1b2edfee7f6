"""Mixed precision by table O1: the same treatment of each operator on every device."""

from __future__ import annotations

from accelcore.precision.kernels import remove

__all__ = ["reset"]


def reset() -> None:
    """Take out of torch what table O1 put there, its kernels."""
    remove()
