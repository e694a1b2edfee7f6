"""Ascend's apex on any device, for scripts that import `amp`, `optimizers` and `parallel` from it.

Only apex's words and its order of calls are here. Precision, scaling, optimizers and gradients are accelcore's own.
"""

from __future__ import annotations

from accelcore.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]
