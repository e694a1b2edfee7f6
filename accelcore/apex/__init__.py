"""Ascend's apex on any device: `from accelcore.apex import amp, optimizers, parallel`, and the script as it was."""

from __future__ import annotations

from accelcore.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]
