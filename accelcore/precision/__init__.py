"""Mixed precision by table O1: each operator treated alike on every device, and the user's own word on functions.

`accel.autocast(table="O1")` and `precision="O1"` are the doors. What O1 puts into torch for that, `reset()` takes out.
"""

from __future__ import annotations

from accelcore.precision.kernels import remove
from accelcore.precision.registration import (
    Registration,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    remove_all,
)
from accelcore.precision.replaced import put_back
from accelcore.precision.table import O1, Treatment

__all__ = [
    "O1",
    "Registration",
    "Treatment",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "reset",
]


def reset() -> None:
    """Take out of torch what accelcore put there: O1's kernels, those of a backend, and wrappers of functions.

    Between regions, not in one. What is made later (a region, a context, a trainer) puts the kernels back; registered
    functions are forgotten.
    """
    remove()
    remove_all()
    put_back()
