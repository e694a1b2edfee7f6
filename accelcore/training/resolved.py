"""The options of a trainer as the rest of it knows them: by one word each, with nothing left to choose."""

from __future__ import annotations

import torch

from accelcore.errors import ConfigurationError
from accelcore.roles.composition import Roles
from accelcore.spellings import BEST, best_dtype, dtype_named
from accelcore.training.options import TrainerOptions
from accelcore.training.policy import Policy
from accelcore.wording import did_you_mean

__all__ = ["resolved"]

_PRESETS: dict[object, str] = {None: "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_WHOLE: dict[str, dict[str, str]] = {
    "bf16-true": {"model_dtype": "bfloat16"},
    "16-true": {"model_dtype": "float16", "loss_scale": "dynamic"},
}
"""Lightning's words for models that are held in a dtype."""
_FP32 = ("ieee", "fast", "fast if possible")


def resolved(options: TrainerOptions, backend: Roles) -> TrainerOptions:
    """The options, each precision by one word; `"best"` and `"fast if possible"` as what they are on this backend.

    Raises:
        ConfigurationError: there is no such `fp32`.
    """
    precision, fp32 = options["precision"], options["fp32"]
    if precision == BEST:
        precision = _PRESETS[best_dtype(backend.precision, backend.capabilities.autocast_dtypes)]
    elif str(precision) in _WHOLE:
        precision = Policy(**_WHOLE[str(precision)])  # type: ignore[arg-type]  # each option has its own type
    elif isinstance(precision, str | int | torch.dtype):
        precision = _PRESETS.get(dtype_named(precision) or precision, str(precision))
    if fp32 is not None and fp32 not in _FP32:
        raise ConfigurationError(
            f"fp32={fp32!r} is no way to compute fp32 products",
            available=", ".join(_FP32),
            remedy=did_you_mean(str(fp32), _FP32, "leave fp32 out to keep the setting there is"),
        )
    if fp32 == "fast if possible":
        fp32 = None if backend.capabilities.fast_fp32 is None else "fast"
    return {**options, "precision": precision, "fp32": fp32}
