"""Arguments of `amp.initialize` as a policy: the preset of an optimization level, with the caller's changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelcore.errors import AmpError
from accelcore.precision.policy import Policy
from accelcore.scaling.contract import LossScale

__all__ = ["Properties", "resolve"]

_LEVELS = ("O0", "O1", "O2", "O3")
_SMALLEST_SCALE = 2.0**-24
"""Default of the smallest scale. apex has none: an endless overflow takes its scale to 0."""


@dataclass(frozen=True)
class Properties:
    """Changes that `amp.initialize` makes to models and optimizers.

    Attributes:
        opt_level: `"O0"` to `"O3"`.
        policy: precision and loss scale. A loss scale of None means 1.
        cast_model_outputs: dtype of the models' outputs; None leaves it alone.
        combine_grad: whether parameters and gradients lie in one piece of memory each.
        combine_ddp: whether ranks exchange gradients in `scale_loss`, instead of in a wrapper around the model.
    """

    opt_level: str
    policy: Policy
    cast_model_outputs: torch.dtype | None
    combine_grad: bool
    combine_ddp: bool

    @property
    def model_dtype(self) -> torch.dtype | None:
        """The dtype that models are held in, and their inputs cast to; None leaves both alone."""
        return getattr(torch, self.policy.model_dtype) if self.policy.model_dtype else None


def resolve(
    opt_level: str,
    *,
    cast_model_type: torch.dtype | bool | None,
    patch_torch_functions: bool | None,
    keep_batchnorm_fp32: bool | str | None,
    master_weights: bool | None,
    loss_scale: float | str | None,
    cast_model_outputs: torch.dtype | None,
    moves: dict[str, Any],
    combine_grad: bool | None,
    combine_ddp: bool | None,
    user_cast_preferred: bool | None,
) -> Properties:
    """Return the properties for the arguments of `amp.initialize`; `moves` has the settings of a dynamic scale.

    Raises:
        AmpError: arguments contradict each other, or one has an invalid value.
    """
    if opt_level not in _LEVELS:
        raise AmpError(f"opt_level={opt_level!r} is not an optimization level", available=", ".join(_LEVELS))
    level = Policy.preset(opt_level)
    if level.autocast:
        _check_casts_only(cast_model_type, keep_batchnorm_fp32, master_weights)
    elif patch_torch_functions or user_cast_preferred:
        raise AmpError(
            f"{'patch_torch_functions' if patch_torch_functions else 'user_cast_preferred'}=True at {opt_level}",
            why="operators and functions are cast at O1 only",
            remedy='leave it out, or use opt_level="O1"',
        )
    combines = bool(combine_ddp) if combine_grad is None else combine_grad
    if combine_ddp and not combines:
        raise AmpError("combine_ddp=True with combine_grad=False", remedy="leave combine_grad out: it is implied")
    if combines and opt_level in ("O0", "O3"):
        raise AmpError(
            f"combine_grad or combine_ddp at {opt_level}",
            why="apex has them at O1 and O2 only",
            remedy='leave them out, or use opt_level="O1" or "O2"',
        )
    default = None if level.model_dtype is None else getattr(torch, level.model_dtype)
    dtype = _dtype("cast_model_type", cast_model_type, default)
    keep = _flag("keep_batchnorm_fp32", keep_batchnorm_fp32, level.keep_batchnorm_fp32)
    casts = level.autocast is not None and patch_torch_functions is not False
    policy = Policy(
        autocast=level.autocast if casts else None,
        table=level.table if casts else "torch",
        loss_scale=_loss_scale(level.loss_scale if loss_scale is None else loss_scale, moves),
        model_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        masters=_flag("master_weights", master_weights, level.masters and level.model_dtype == "float16"),
        keep_batchnorm_fp32=keep and dtype is not None,
        cast_boundary=dtype is not None,
    )
    outputs = _dtype("cast_model_outputs", cast_model_outputs, None) or (None if dtype is None else torch.float32)
    return Properties(opt_level, policy, outputs, combines, bool(combine_ddp))


def _loss_scale(loss_scale: float | str | LossScale | None, moves: dict[str, Any]) -> float | LossScale | None:
    """Return a static loss scale, the settings of a dynamic one, or None for a scale of 1."""
    if loss_scale is None:
        return None
    if loss_scale == "dynamic":
        init = min(moves["init"], moves["max"])
        floor = min(_SMALLEST_SCALE, init) if moves["min"] is None else moves["min"]
        return LossScale(**{**moves, "init": init, "min": floor})
    try:
        scale = float(loss_scale)  # type: ignore[arg-type]  # anything, from a script
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(loss_scale, bool) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise AmpError(f"loss_scale={loss_scale!r} is not a loss scale", available='a number > 0, or "dynamic"')
    return None if scale == 1.0 else scale


def _check_casts_only(
    cast_model_type: torch.dtype | bool | None, keep_batchnorm_fp32: bool | str | None, master_weights: bool | None
) -> None:
    dtype = None if cast_model_type in (False, torch.float32) else cast_model_type
    options = {"cast_model_type": dtype, "keep_batchnorm_fp32": keep_batchnorm_fp32, "master_weights": master_weights}
    for name, value in options.items():
        if value is not None:
            raise AmpError(
                f"{name}={value} at O1",
                why="O1 casts the inputs of operators, and leaves the model itself in fp32",
                remedy='leave it out, or use opt_level="O2"',
            )


def _flag(name: str, given: bool | str | None, default: bool) -> bool:
    """Return a switch as a bool; scripts pass on words from their command line."""
    if given is None:
        return default
    if given not in (True, False, "True", "False"):
        raise AmpError(f"{name}={given!r} is neither True nor False", available='True, False, "True", "False", None')
    return given in (True, "True")


def _dtype(name: str, given: torch.dtype | bool | None, default: torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return default
    if given is False:
        return None
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise AmpError(f"{name}={given!r} is not a floating-point dtype of torch", remedy="give one: torch.float16")
    return given
