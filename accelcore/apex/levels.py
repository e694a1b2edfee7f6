"""What the arguments of `amp.initialize` mean: an optimization level, and what was asked for in place of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelcore.errors import AmpError
from accelcore.roles.loss_scale import LossScale

__all__ = ["Properties", "loss_scaling", "resolve"]

_SMALLEST_SCALE = 2.0**-24
"""Where no smallest scale is given. apex then has none: an endless overflow takes its scale to 0."""


@dataclass(frozen=True)
class Properties:
    """What `amp.initialize` does to models and optimizers.

    Attributes:
        opt_level: `"O0"` to `"O3"`.
        cast_model_type: dtype that models are held in, and their inputs cast to; None leaves both alone.
        patches: whether operators are cast by table O1.
        keep_batchnorm_fp32: whether BatchNorm is held in fp32.
        master_weights: whether parameters in low precision have fp32 masters.
        loss_scale: a number for a static scale, or how a dynamic one moves.
        cast_model_outputs: dtype of what models return; None leaves it alone.
        combine_grad: whether parameters and gradients lie in one piece of memory each.
        combine_ddp: whether ranks exchange gradients here, and not in a wrapper around the model.
    """

    opt_level: str
    cast_model_type: torch.dtype | None
    patches: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | LossScale
    cast_model_outputs: torch.dtype | None
    combine_grad: bool
    combine_ddp: bool


@dataclass(frozen=True)
class _Level:
    cast_model_type: torch.dtype | None
    patches: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    loss_scale: float | str


_LEVELS = {
    "O0": _Level(torch.float32, False, False, False, 1.0),
    "O1": _Level(None, True, False, False, "dynamic"),
    "O2": _Level(torch.float16, False, True, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, False, 1.0),
}


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
    """The properties that the arguments of `amp.initialize` ask for; `moves`: those of the dynamic scale, by its names.

    Raises:
        AmpError: they contradict each other, or one has a value that it cannot have.
    """
    if opt_level not in _LEVELS:
        raise AmpError(f"opt_level={opt_level!r} is no optimization level", available=", ".join(_LEVELS))
    level = _LEVELS[opt_level]
    if level.patches:
        _check_casts_only(cast_model_type, keep_batchnorm_fp32, master_weights)
    elif patch_torch_functions or user_cast_preferred:
        raise AmpError(
            f"{'patch_torch_functions' if patch_torch_functions else 'user_cast_preferred'}=True at {opt_level}",
            why="operators and functions are cast at O1 only",
            remedy='leave it out, or say opt_level="O1"',
        )
    combines = bool(combine_ddp) if combine_grad is None else combine_grad
    if combine_ddp and not combines:
        raise AmpError("combine_ddp=True with combine_grad=False", remedy="leave combine_grad out: it is implied")
    if combines and opt_level in ("O0", "O3"):
        raise AmpError(
            f"combine_grad or combine_ddp at {opt_level}",
            why="apex has them at O1 and O2 only",
            remedy='leave them out, or say opt_level="O1" or "O2"',
        )
    return Properties(
        opt_level=opt_level,
        cast_model_type=_dtype("cast_model_type", cast_model_type, level.cast_model_type),
        patches=level.patches if patch_torch_functions is None else patch_torch_functions,
        keep_batchnorm_fp32=_flag("keep_batchnorm_fp32", keep_batchnorm_fp32, level.keep_batchnorm_fp32),
        master_weights=_flag("master_weights", master_weights, level.master_weights),
        loss_scale=loss_scaling(level.loss_scale if loss_scale is None else loss_scale, **moves),
        cast_model_outputs=_dtype("cast_model_outputs", cast_model_outputs, None),
        combine_grad=combines,
        combine_ddp=bool(combine_ddp),
    )


def loss_scaling(
    loss_scale: float | str, *, init: float, growth: float, backoff: float, window: int, min: float | None, max: float
) -> float | LossScale:
    """The number of a static loss scale, or how a dynamic one moves.

    Raises:
        AmpError: it is no number > 0, nor `"dynamic"`.
        ConfigurationError: no dynamic scale can move like that.
    """
    if loss_scale == "dynamic":
        init = init if init < max else max
        floor = min if min is not None else _SMALLEST_SCALE if init > _SMALLEST_SCALE else init
        return LossScale(init=init, growth=growth, backoff=backoff, interval=window, min=floor, max=max)
    try:
        scale = float(loss_scale)
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(loss_scale, bool) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise AmpError(f"loss_scale={loss_scale!r} is not a loss scale", available='a number > 0, or "dynamic"')
    return scale


def _check_casts_only(
    cast_model_type: torch.dtype | bool | None, keep_batchnorm_fp32: bool | str | None, master_weights: bool | None
) -> None:
    """Raise for what O1, which leaves models in fp32, cannot do to them."""
    if cast_model_type not in (None, False, torch.float32):
        given = f"cast_model_type={cast_model_type}"
    elif keep_batchnorm_fp32 is not None:
        given = f"keep_batchnorm_fp32={keep_batchnorm_fp32}"
    elif master_weights is not None:
        given = f"master_weights={master_weights}"
    else:
        return
    raise AmpError(
        f"{given} at O1",
        why="O1 casts what operators are given, and leaves the model itself in fp32",
        remedy='leave it out, or say opt_level="O2"',
    )


def _flag(name: str, given: bool | str | None, default: bool) -> bool:
    """A yes or no; scripts hand on what was typed on a command line."""
    if given is None:
        return default
    if given not in (True, False, "True", "False"):
        raise AmpError(f"{name}={given!r} is neither yes nor no", available='True, False, "True", "False", None')
    return given in (True, "True")


def _dtype(name: str, given: torch.dtype | bool | None, default: torch.dtype | None) -> torch.dtype | None:
    if given is None:
        return default
    if given is False:
        return None
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise AmpError(f"{name}={given!r} is no floating-point dtype of torch's", remedy="give one: torch.float16")
    return given
