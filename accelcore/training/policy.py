"""Precision policies: what `precision=` in a trainer means in dtypes and scaling."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import torch

from accelcore.errors import ConfigurationError
from accelcore.roles.scaler import LossScale, LossScaler, Scalers

__all__ = ["LOW", "Policy", "choose_policy", "create_scaler"]

LOW = (torch.bfloat16, torch.float16)
"""Dtypes too coarse to add up small updates in."""


@dataclass(frozen=True)
class Policy:
    """One precision of a whole training. Dtypes go by torch's names: `"bfloat16"`.

    Attributes:
        autocast: dtype of the forward pass under autocast; None runs it as the model is.
        loss_scale: None for none, a number for a static scale, `"dynamic"`, or a `LossScale` for a dynamic one with
            settings of your own.
        model_dtype: dtype that the model's floating-point parameters and buffers are held in; None leaves them alone.
            Batches are the script's to cast, or autocast's.
        masters: whether parameters held in bf16 or fp16 have fp32 masters: the optimizer updates those, with fp32
            moments, and the model gets them rounded (Micikevicius et al., "Mixed Precision Training", 2018, section
            3.1). Without them an update smaller than half the spacing of numbers there is lost.
        table: the op table of autocast: `"torch"`, or `"O1"`, which is the same on every device.

    Raises:
        ConfigurationError: there is no such dtype, a loss scale that is neither a number > 0 nor `"dynamic"`, a table
            and no autocast.
    """

    autocast: str | None = None
    loss_scale: float | str | LossScale | None = None
    model_dtype: str | None = None
    masters: bool = True
    table: str = "torch"

    def __post_init__(self) -> None:
        for name in ("autocast", "model_dtype"):
            value = getattr(self, name)
            if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
                raise ConfigurationError(
                    f"{name}={value!r} is no dtype of torch's",
                    available='"bfloat16", "float16", "float32", "float64"; what of these a device takes, it declares',
                )
        if self.table != "torch" and self.autocast is None:
            raise ConfigurationError(
                f"table={self.table!r} has no meaning without autocast", remedy='give a dtype, autocast="float16"'
            )
        scale = self.loss_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf
        if not (scale is None or scale == "dynamic" or isinstance(scale, LossScale) or number):
            raise ConfigurationError(
                f"loss_scale={scale!r} is not a loss scale",
                available='a number > 0, "dynamic", accelcore.LossScale(...), or None for the precision\'s own',
            )


_PRESETS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"autocast": "bfloat16"},  # fp32's range: small gradients need no scale
    "fp16": {"autocast": "float16", "loss_scale": "dynamic"},
    "O1": {"autocast": "float16", "table": "O1", "loss_scale": "dynamic"},
}


def choose_policy(precision: str | Policy, loss_scale: float | str | LossScale | None) -> Policy:
    """The policy a trainer was asked for, with `loss_scale` in place of the policy's own where it is given.

    Raises:
        ConfigurationError: there is no such precision, or a loss scale that is neither a number > 0 nor `"dynamic"`.
    """
    if not isinstance(precision, Policy) and str(precision) not in _PRESETS:
        raise ConfigurationError(f"there is no precision {precision!r}", available=", ".join(_PRESETS))
    policy = precision if isinstance(precision, Policy) else Policy(**_PRESETS[str(precision)])  # type: ignore[arg-type]
    return policy if loss_scale is None else replace(policy, loss_scale=loss_scale)


def create_scaler(scalers: Scalers, policy: Policy) -> LossScaler:
    """The loss scaler of a policy; one that does nothing where it has no loss scale."""
    if policy.loss_scale is None:
        return scalers.none()
    if isinstance(policy.loss_scale, LossScale):
        return scalers.create(**asdict(policy.loss_scale))
    if policy.loss_scale == "dynamic":
        return scalers.create()
    return scalers.create(init=float(policy.loss_scale), dynamic=False)
