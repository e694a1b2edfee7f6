"""Precision policies: what `precision=` in a trainer means in dtypes and scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from accelcore.errors import ConfigurationError
from accelcore.roles.scaler import LossScale, LossScaler, Scalers
from accelcore.spellings import BEST
from accelcore.wording import did_you_mean

__all__ = ["LOW", "Policy", "choose_policy", "create_scaler"]

LOW = (torch.bfloat16, torch.float16)
"""Dtypes too coarse to add up small updates in."""

_TABLES = ("torch", "O1")


@dataclass(frozen=True)
class Policy:
    """One precision of a whole training. Dtypes go by torch's names: `"bfloat16"`.

    Attributes:
        autocast: dtype of the forward pass under autocast; None runs it as the model is.
        loss_scale: None for none, a number for a static scale, `"dynamic"`, or a `LossScale` for a dynamic one with
            settings of your own.
        model_dtype: dtype that the model's floating-point parameters and buffers are held in; None leaves them alone.
            Its `state_dict()` is in fp32 all the same, as long as the trainer lives.
        masters: whether parameters held in bf16 or fp16 have fp32 masters: the optimizer updates those, with fp32
            moments, and the model gets them rounded (Micikevicius et al., "Mixed Precision Training", 2018, section
            3.1). Without them an update smaller than half the spacing of numbers there is lost.
        table: the op table of autocast: `"torch"`, or `"O1"`, which is the same on every device.
        keep_batchnorm_fp32: whether BatchNorm that has weights is held in fp32, whatever `model_dtype` is.
        cast_boundary: whether floating-point tensors that the model is given are cast to `model_dtype`, and those that
            it returns to fp32. Otherwise batches are the script's to cast, or autocast's.

    Raises:
        ConfigurationError: there is no such dtype or table, a loss scale that is neither a number > 0 nor `"dynamic"`,
            a switch that is neither True nor False; what needs an autocast, or a `model_dtype`, without one.
    """

    autocast: str | None = None
    loss_scale: float | str | LossScale | None = None
    model_dtype: str | None = None
    masters: bool = True
    table: str = "torch"
    keep_batchnorm_fp32: bool = False
    cast_boundary: bool = False

    @staticmethod
    def preset(name: str, *, dtype: str | None = None) -> Policy:
        """The policy of a preset, to look at, or to change by `dataclasses.replace`.

        Args:
            name: `"fp32"`, `"bf16"`, `"fp16"`, or one of apex's levels: `"O0"` (all in fp32), `"O1"` (autocast by the
                op table of that name), `"O2"` (model in fp16 but for BatchNorm, fp32 masters, inputs cast, outputs in
                fp32), `"O3"` (all in fp16).
            dtype: the low precision of `"O1"`, `"O2"` and `"O3"`: `"float16"`, which is meant by None, or
                `"bfloat16"`, which has the range of fp32, and so no loss scale.

        Raises:
            ConfigurationError: there is no such preset, or not in that dtype.
        """
        if str(name) not in _PRESETS:
            raise _unknown(name, _PRESETS)
        if dtype is not None and (name not in _LEVELS or dtype not in _LEVEL_DTYPES):
            raise ConfigurationError(
                f"there is no precision {name!r} in {dtype!r}",
                available=f"{', '.join(_LEVELS)} in {' or '.join(_LEVEL_DTYPES)}",
            )
        return _of_dtype(_PRESETS[name](), dtype) if dtype else _PRESETS[name]()

    def __post_init__(self) -> None:
        for name in ("autocast", "model_dtype"):
            value = getattr(self, name)
            if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
                raise ConfigurationError(
                    f"{name}={value!r} is no dtype of torch's",
                    available='"bfloat16", "float16", "float32", "float64"; what of these a device takes, it declares',
                )
        for name in ("masters", "keep_batchnorm_fp32", "cast_boundary"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if self.table not in _TABLES:
            raise ConfigurationError(f"table={self.table!r} is no op table", available=", ".join(_TABLES))
        if self.table != "torch" and self.autocast is None:
            raise ConfigurationError(
                f"table={self.table!r} has no meaning without autocast", remedy='give a dtype, autocast="float16"'
            )
        for name in ("keep_batchnorm_fp32", "cast_boundary"):
            if getattr(self, name) and self.model_dtype is None:
                raise ConfigurationError(
                    f"{name}=True has no meaning without model_dtype", remedy='give a dtype, model_dtype="float16"'
                )
        scale = self.loss_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf
        if not (scale is None or scale == "dynamic" or isinstance(scale, LossScale) or number):
            raise ConfigurationError(
                f"loss_scale={scale!r} is not a loss scale",
                available='a number > 0, "dynamic", accelcore.LossScale(...), or None for the precision\'s own',
            )


_PRESETS: dict[str, Callable[[], Policy]] = {
    "fp32": Policy,
    "bf16": partial(Policy, autocast="bfloat16"),  # fp32's range: small gradients need no scale
    "fp16": partial(Policy, autocast="float16", loss_scale="dynamic"),
    "O0": partial(Policy, model_dtype="float32", cast_boundary=True),
    "O1": partial(Policy, autocast="float16", table="O1", loss_scale="dynamic"),
    "O2": partial(Policy, model_dtype="float16", keep_batchnorm_fp32=True, cast_boundary=True, loss_scale="dynamic"),
    "O3": partial(Policy, model_dtype="float16", masters=False, cast_boundary=True),
}
_LEVELS = ("O1", "O2", "O3")
_LEVEL_DTYPES = ("float16", "bfloat16")


def _of_dtype(policy: Policy, dtype: str) -> Policy:
    return replace(
        policy,
        autocast=policy.autocast and dtype,
        model_dtype=policy.model_dtype and dtype,
        loss_scale=policy.loss_scale if dtype == "float16" else None,
    )


def _unknown(precision: object, known: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"there is no precision {precision!r}",
        available=", ".join(known),
        remedy=did_you_mean(str(precision), known),
    )


def choose_policy(precision: object, loss_scale: float | str | LossScale | None) -> Policy:
    """The policy a trainer was asked for, with `loss_scale` in place of the policy's own where it is given.

    Raises:
        ConfigurationError: there is no such precision, or a loss scale that is neither a number > 0 nor `"dynamic"`.
    """
    if not isinstance(precision, Policy) and str(precision) not in _PRESETS:
        raise _unknown(precision, (*_PRESETS, BEST))
    policy = precision if isinstance(precision, Policy) else Policy.preset(str(precision))
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
