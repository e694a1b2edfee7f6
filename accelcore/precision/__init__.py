"""Precision: the role, policies and presets, casts of a model, table O1, and kernels in torch's dispatcher.

Loss scales are in `scaling`, and fp32 masters in `training/gradients.py`.
`accel.autocast(table="O1")` and `precision="O1"` use table O1. `reset()` removes everything that it installs in torch.
"""

from __future__ import annotations

from accelcore.precision.dispatcher import overrides
from accelcore.precision.o1.autocast import forget_installed
from accelcore.precision.o1.registration import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    remove_all,
)
from accelcore.precision.o1.table import O1, Treatment

__all__ = [
    "O1", "Treatment", "float_function", "half_function", "promote_function", "register_float_function",
    "register_half_function", "register_promote_function", "reset",
]  # fmt: skip


def reset() -> None:
    """Remove everything that accelcore installed in torch: O1's kernels, a backend's, and wrappers of functions.

    Call it between regions, not inside one. A region, context or trainer made later installs the kernels again;
    registered functions stay forgotten.
    """
    overrides.remove()
    forget_installed()
    remove_all()
