"""What others call a precision, and what "if it helps here" means on a backend."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accelcore.errors import ConfigurationError
from accelcore.roles.precision import Precision

__all__ = ["BEST", "best_dtype", "dtype_named", "dtype_of"]

BEST = "best"
"""The precision that is fastest here, which may be fp32."""

_NAMES = {
    "float32": "float32", "fp32": "float32", "32": "float32", "32-true": "float32", "no": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "bf16-mixed": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16", "16": "float16", "16-mixed": "float16",
}  # fmt: skip


def dtype_named(spelled: object) -> str | None:
    """Torch's name of the dtype that a precision goes by, in torch, accelerate or Lightning; None for another word."""
    return _NAMES.get(str(spelled).removeprefix("torch."))


def best_dtype(precision: Precision, declared: Iterable[str]) -> str | None:
    """Return the first of the declared dtypes that the device has hardware for; None if fp32 is fastest."""
    return next((name for name in declared if precision.has_units(getattr(torch, name))), None)


def dtype_of(spelled: torch.dtype | str) -> torch.dtype:
    """The dtype of a word for it.

    Raises:
        ConfigurationError: it is none.
    """
    name = dtype_named(spelled)
    if isinstance(spelled, torch.dtype):
        return spelled
    if name is None:
        raise ConfigurationError(
            f"{spelled!r} is no dtype", available=f'torch.bfloat16, "bfloat16", "bf16", and so on; "{BEST}"'
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype
