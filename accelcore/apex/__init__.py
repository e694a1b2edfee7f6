"""Ascend's apex on any device, for scripts that import `amp`, `optimizers` and `parallel` from it."""

from __future__ import annotations

from accelcore.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]
