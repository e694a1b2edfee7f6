"""Arguments of `amp.initialize` as a policy: the preset of an optimization level, with the caller's changes."""

from __future__ import annotations

from collections.abc import Mapping
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


def resolve(given: Mapping[str, Any]) -> Properties:
    """Return the properties for the arguments of `amp.initialize`.

    Raises:
        AmpError: arguments contradict each other, or one has an invalid value.
    """
    opt_level, combine_ddp = given["opt_level"], given["combine_ddp"]
    if opt_level not in _LEVELS:
        raise AmpError(
            f"opt_level={opt_level!r} is not an optimization level",
            available=", ".join(_LEVELS),
            remedy='choose one of those; Ascend recommends "O2" with loss_scale=128.0',
        )
    level = Policy.preset(opt_level)
    if level.autocast:
        _check_casts_only(given)
    for name in ("patch_torch_functions", "user_cast_preferred"):
        if given[name] and not level.autocast:
            raise AmpError(
                f"{name}=True at {opt_level} has no effect",
                why="operators and functions are cast at O1 only",
                remedy='leave it out, or use opt_level="O1"',
            )
    combines = bool(combine_ddp if given["combine_grad"] is None else given["combine_grad"])
    if combine_ddp and not combines:
        raise AmpError(
            "combine_ddp=True contradicts combine_grad=False",
            why="ranks exchange gradients in one piece of memory",
            remedy="leave combine_grad out: it is implied",
        )
    if combines and opt_level in ("O0", "O3"):
        raise AmpError(
            f"combine_grad or combine_ddp at {opt_level} is not possible",
            why="apex has them at O1 and O2 only",
            remedy='leave them out, or use opt_level="O1" or "O2"',
        )
    default = None if level.model_dtype is None else getattr(torch, level.model_dtype)
    dtype = _dtype("cast_model_type", given, default)
    keep = _flag("keep_batchnorm_fp32", given, level.keep_batchnorm_fp32)
    casts = level.autocast is not None and given["patch_torch_functions"] is not False
    policy = Policy(
        autocast=level.autocast if casts else None,
        table=level.table if casts else "torch",
        loss_scale=_loss_scale(level.loss_scale if given["loss_scale"] is None else given["loss_scale"], given),
        model_dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        masters=_flag("master_weights", given, level.masters and level.model_dtype == "float16"),
        keep_batchnorm_fp32=keep and dtype is not None,
        cast_boundary=dtype is not None,
    )
    outputs = _dtype("cast_model_outputs", given, None) or (None if dtype is None else torch.float32)
    return Properties(opt_level, policy, outputs, combines, bool(combine_ddp))


def _loss_scale(loss_scale: Any, given: Mapping[str, Any]) -> float | LossScale | None:
    """Return a static loss scale, the settings of a dynamic one, or None for a scale of 1."""
    if loss_scale is None:
        return None
    if loss_scale == "dynamic":
        largest, smallest = given["max_loss_scale"], given["min_loss_scale"]
        init = min(given["dynamic_init_scale"], largest)
        return LossScale(
            init=init,
            growth=given["scale_growth_factor"],
            backoff=given["scale_backoff_factor"],
            interval=given["scale_window"],
            min=min(_SMALLEST_SCALE, init) if smallest is None else smallest,
            max=largest,
        )
    try:
        scale = float(loss_scale)
    except (TypeError, ValueError):
        scale = 0.0
    if isinstance(loss_scale, bool) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise AmpError(f"loss_scale={loss_scale!r} is not a loss scale", remedy='give a number > 0, or "dynamic"')
    return None if scale == 1.0 else scale


def _check_casts_only(given: Mapping[str, Any]) -> None:
    for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
        value = given[name]
        if value is not None and not (name == "cast_model_type" and value in (False, torch.float32)):
            raise AmpError(
                f"{name}={value} at O1 has no effect",
                why="O1 casts the inputs of operators, and leaves the model itself in fp32",
                remedy='leave it out, or use opt_level="O2"',
            )


def _flag(name: str, given: Mapping[str, Any], default: bool) -> bool:
    """Return a switch as a bool; scripts pass on words from their command line."""
    value = given[name]
    if value not in (None, True, False, "True", "False"):
        raise AmpError(f"{name}={value!r} is neither True nor False", remedy='give True, False, "True" or "False"')
    return default if value is None else value in (True, "True")


def _dtype(name: str, given: Mapping[str, Any], default: torch.dtype | None) -> torch.dtype | None:
    value = given[name]
    if value is None or value is False:
        return default if value is None else None
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise AmpError(f"{name}={value!r} is not a floating-point dtype of torch", remedy="give one: torch.float16")
    return value
