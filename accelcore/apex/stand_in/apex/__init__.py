"""Module that a script imports as `apex` under `accelcore run --apex`, and nowhere else."""

from __future__ import annotations

import sys

from accelcore.apex import amp, optimizers, parallel

__all__ = ["amp", "optimizers", "parallel"]

for _module in (amp, optimizers, parallel):  # also for `from apex.amp import initialize`
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
