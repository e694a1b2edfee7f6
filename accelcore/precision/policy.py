"""Precision policies: the presets and aliases of `precision=`, each with its dtypes and loss scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, cast, get_args

import torch

from accelcore.errors import ConfigurationError, Settings, did_you_mean, nearest
from accelcore.scaling.contract import LossScaler
from accelcore.scaling.dynamic import LossScale, Scalers
from accelcore.util.text import is_number, text_remedy

LOW_PRECISION = (torch.bfloat16, torch.float16)  # dtypes too coarse to accumulate small updates in

_TABLES = ("torch", "O1")
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BEST = "best"
Fp32Mode = Literal["ieee", "fast", "fast if possible"]
_FP32_WORDS = {"tf32": "fast", "high": "fast", "medium": "fast", "highest": "ieee"}  # of torch
_LEVELS = ("O1", "O2", "O3")
_LEVEL_DTYPES = ("float16", "bfloat16")
# Words of torch, accelerate and Lightning.
_ALIASES = {
    "float32": "fp32", "32": "fp32", "32-true": "fp32", "no": "fp32",
    "bfloat16": "bf16", "bf16-mixed": "bf16",
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16",
}  # fmt: skip
PrecisionWord = Literal[
    "fp32", "bf16", "fp16", "bf16-true", "16-true", "O0", "O1", "O2", "O3", "best",
    "float32", "32", 32, "32-true", "no", "bfloat16", "bf16-mixed", "float16", "half", "16", 16, "16-mixed",
]  # fmt: skip
"""Presets and their aliases, for type checkers."""


def _canonical(word: object) -> str:
    name = str(word).removeprefix("torch.")
    return _ALIASES.get(name, name)


@dataclass(frozen=True)
class Policy(Settings):
    """Precision of a whole training run. Dtypes are torch's names, such as `"bfloat16"` or `"bf16"`.

    Example:
        >>> policy = accelcore.Policy(model_dtype="bfloat16", cast_boundary=True)
        >>> trainer = accel.trainer(model, optimizer, loss=loss, precision=policy)

    Attributes:
        autocast: dtype of the forward pass under autocast; None means no autocast.
        loss_scale: None for no loss scale, a number for a static scale, `"dynamic"`, or a `LossScale` with settings for
            a dynamic one.
        model_dtype: dtype of the model's floating-point parameters and buffers; None leaves them alone. While the
            trainer lives, the model's `state_dict()` is in fp32 in any case.
        masters: whether parameters in bf16 or fp16 have fp32 masters. The optimizer updates the masters, with fp32
            moments, and the model gets them rounded (Micikevicius et al., "Mixed Precision Training", 2018, section
            3.1). Without masters, an update smaller than half the spacing of low-precision numbers is lost.
        table: the op table of autocast: `"torch"`, or `"O1"`, which is the same on every device.
        keep_batchnorm_fp32: whether BatchNorm with weights is held in fp32, whatever `model_dtype` is.
        cast_boundary: whether the model's floating-point inputs are cast to `model_dtype` and its outputs to fp32. If
            False, the script or autocast has to cast the batches.

    Raises:
        ConfigurationError: unknown dtype or table; a loss scale that is neither a number > 0 nor `"dynamic"`; a switch
            that is neither True nor False; an option that needs `autocast` or `model_dtype`, without it.
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
        """Return the policy of a preset, to inspect it or to change it with `dataclasses.replace`.

        Args:
            name: `"fp32"`, `"bf16"`, `"fp16"`, `"bf16-true"`, `"16-true"`, or one of apex's levels: `"O0"` (everything
                in fp32), `"O1"` (autocast with the op table O1), `"O2"` (model in fp16 except BatchNorm, fp32 masters,
                inputs cast, outputs in fp32), `"O3"` (everything in fp16).
            dtype: low precision of `"O1"`, `"O2"` and `"O3"`: `"float16"` (the default), or `"bfloat16"`, which has the
                range of fp32 and so needs no loss scale.

        Raises:
            ConfigurationError: unknown preset, or a preset that does not exist in that dtype.
        """
        if str(name) not in _PRESETS:
            raise _unknown(name, _PRESETS)
        policy = _PRESETS[str(name)]
        if dtype is None:
            return policy
        if name not in _LEVELS or dtype not in _LEVEL_DTYPES:
            raise ConfigurationError(
                f"there is no precision {name!r} in {dtype!r}",
                available=f"{', '.join(_LEVELS)} in {' or '.join(_LEVEL_DTYPES)}",
            )
        return replace(
            policy,
            autocast=policy.autocast and dtype,
            model_dtype=policy.model_dtype and dtype,
            loss_scale=policy.loss_scale if dtype == "float16" else None,
        )

    def __post_init__(self) -> None:
        for name in ("autocast", "model_dtype"):
            given = getattr(self, name)
            if given is None:
                continue
            value = str(_DTYPES.get(_canonical(given), given)).removeprefix("torch.")
            if value not in _FLOATS:
                raise ConfigurationError(
                    f"{name}={given!r} is not a floating-point dtype",
                    available=f"{', '.join(_FLOATS)}; each device declares which of them it supports",
                    remedy=did_you_mean(str(given), (*_FLOATS, *_DTYPES)),
                )
            object.__setattr__(self, name, value)
        for name in ("masters", "keep_batchnorm_fp32", "cast_boundary"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not a switch", remedy="give True or False")
        if self.table not in _TABLES:
            raise ConfigurationError(f"table={self.table!r} is not an op table", available=", ".join(_TABLES))
        if self.table != "torch" and self.autocast is None:
            raise ConfigurationError(
                f"table={self.table!r} has no effect without autocast", remedy='give a dtype, autocast="float16"'
            )
        for name in ("keep_batchnorm_fp32", "cast_boundary"):
            if getattr(self, name) and self.model_dtype is None:
                raise ConfigurationError(
                    f"{name}=True has no effect without model_dtype", remedy='give a dtype, model_dtype="float16"'
                )
        scale = self.loss_scale
        number = is_number(scale) and 0 < scale < math.inf
        if not (scale is None or scale == "dynamic" or isinstance(scale, LossScale) or number):
            raise ConfigurationError(
                f"loss_scale={scale!r} is not a loss scale",
                available='a number > 0, "dynamic", accelcore.LossScale(...), or None for the precision\'s default',
                remedy=text_remedy(scale),
            )


_PRESETS = {
    "fp32": Policy(),
    "bf16": Policy(autocast="bfloat16"),  # has the range of fp32: small gradients need no loss scale
    "fp16": Policy(autocast="float16", loss_scale="dynamic"),
    "bf16-true": Policy(model_dtype="bfloat16"),
    "16-true": Policy(model_dtype="float16", loss_scale="dynamic"),
    "O0": Policy(model_dtype="float32", cast_boundary=True),
    "O1": Policy(autocast="float16", table="O1", loss_scale="dynamic"),
    "O2": Policy(model_dtype="float16", keep_batchnorm_fp32=True, cast_boundary=True, loss_scale="dynamic"),
    "O3": Policy(model_dtype="float16", masters=False, cast_boundary=True),
}


Fastest = Callable[[], "torch.dtype | None"]
"""Function that returns the dtype for `"best"` on a device; None if that is fp32."""


def preset_name(precision: object, fastest: Fastest) -> PrecisionWord | Policy:
    """Return the preset's name for a preset, an alias of one, a torch dtype, or `"best"`; a `Policy` as it is."""
    if isinstance(precision, Policy):
        return precision
    if precision == _BEST:
        precision = fastest() or torch.float32
    name = _canonical(precision)
    if name not in _PRESETS:
        raise _unknown(precision, (*_PRESETS, _BEST))
    return cast("PrecisionWord", name)


def choose_policy(precision: object, loss_scale: float | str | LossScale | None) -> Policy:
    """Return the policy of a preset, with `loss_scale` instead of the preset's own unless it is None."""
    policy = precision if isinstance(precision, Policy) else Policy.preset(str(precision))
    return policy if loss_scale is None else replace(policy, loss_scale=loss_scale)


def skipping(policy: Policy) -> Policy:
    """Return a policy whose loss scale skips updates. If it has a fixed one or none, it gets a constant dynamic one."""
    if not (policy.loss_scale is None or is_number(policy.loss_scale)):
        return policy
    scale = float(policy.loss_scale or 1.0)
    return replace(policy, loss_scale=LossScale(init=scale, min=scale, max=scale))


def autocast_dtype(dtype: torch.dtype | str, fastest: Fastest) -> torch.dtype | None:
    """Return the dtype of a word such as `"bf16"`; None for fp32, also if that is what `"best"` is on the device."""
    if dtype == _BEST:
        return fastest()
    found = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(_canonical(dtype))
    if found is None:
        raise ConfigurationError(
            f"{dtype!r} is not a dtype",
            available=f'torch.bfloat16, "bfloat16", "bf16", and so on; "{_BEST}"',
            remedy=did_you_mean(str(dtype), (*_FLOATS, *_DTYPES), "leave it out for the device's own dtype"),
        )
    return None if found == torch.float32 else found


def fp32_mode(mode: Fp32Mode | None, fast_fp32: str | None) -> Fp32Mode | None:
    """Return `"ieee"`, `"fast"` or None for a trainer's option `fp32`; `fast_fp32`: as the backend declares it."""
    if mode is not None and mode not in get_args(Fp32Mode):
        meant = _FP32_WORDS.get(str(mode), str(mode))
        raise ConfigurationError(
            f"fp32={mode!r} is not a mode of fp32 products",
            available=", ".join(get_args(Fp32Mode)),
            remedy=did_you_mean(meant, get_args(Fp32Mode), "remove fp32 to keep torch's setting"),
        )
    if mode == "fast if possible":
        return None if fast_fp32 is None else "fast"
    return mode


def create_scaler(scalers: Scalers, policy: Policy) -> LossScaler:
    """Create the loss scaler of a policy; without a loss scale, one that does nothing."""
    if policy.loss_scale is None:
        return scalers.none()
    if isinstance(policy.loss_scale, LossScale):
        return scalers.create(**asdict(policy.loss_scale))
    if policy.loss_scale == "dynamic":
        return scalers.create()
    return scalers.create(init=float(policy.loss_scale), dynamic=False)


def _unknown(precision: object, known: Iterable[str]) -> ConfigurationError:
    word = str(precision).lower().removeprefix("torch.")
    near = "bf16" if word in ("amp", "mixed") else nearest(word, (*known, *_ALIASES))
    if re.search(r"(?<!\d)(8|64)(?!\d)", word):  # float64 is similar to float16, and something else is meant
        near = None
    return ConfigurationError(
        f"there is no precision {precision!r}",
        available=", ".join(known),
        remedy="name its parts: Policy(**options)"
        if isinstance(precision, Mapping)
        else f"did you mean {_canonical(near)!r}?"
        if near
        else "",
    )
