"""Dynamic loss scale (`GradScaler`), its settings, and the role that makes loss scalers (`Scalers`).

The dynamic scale follows torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). It
has the same defaults, order of calls and state. There are two differences. The scale stays within `[min, max]`, so that
endless overflows cannot make it zero and the next update NaN. And it works on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, ConfigurationError, Settings, TrainingError, logger
from accelcore.scaling.contract import (
    OF_APEX,
    VERSION,
    AnyRank,
    FindBad,
    Given,
    LossScaler,
    NoScaler,
    OverflowStreak,
    StaticScaler,
    by_dtype,
    check_find_bad,
    check_version,
    gradients_of,
    marked,
    refuse_closure,
    refuse_fp16,
    step_in_kernel,
)
from accelcore.util.text import is_number, is_whole

__all__ = ["GradScaler", "LossScale", "Scalers"]

_OF_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")

_LARGEST = 2**31 - 1  # largest count in a state: counts are int32 on the device, as torch's


@dataclass(frozen=True)
class LossScale(Settings):
    """Settings of a dynamic loss scale. torch.amp.GradScaler has the same defaults, but no bounds.

    Example:
        >>> scale = accelcore.LossScale(init=1024.0, interval=500)
        >>> trainer = accel.trainer(model, optimizer, precision="fp16", loss_scale=scale)

    Attributes:
        init: the scale of the first step.
        growth: factor of the scale after `interval` clean steps in a row.
        backoff: factor of the scale after an overflow.
        interval: number of clean steps until the scale grows.
        min: lower bound of the scale.
        max: upper bound of the scale, as in Ascend's apex.

    Raises:
        ConfigurationError: no dynamic scale can work with these settings.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    min: float = 1.0
    max: float = 2.0**24

    def __post_init__(self) -> None:
        if not (
            all(map(is_number, astuple(self)))
            and 0 < self.min <= self.init <= self.max < math.inf
            and 1 < self.growth < math.inf
            and 0 < self.backoff < 1
            and is_whole(self.interval, 1)
        ):
            raise ConfigurationError(
                f"no loss scale can work with {self}",
                remedy="choose 0 < min <= init <= max, growth > 1, 0 < backoff < 1 and a whole interval >= 1",
            )


@dataclass
class _Progress:
    """An optimizer in this step; `known`: whether it overflowed, if the host has read that."""

    optimizer: Optimizer
    found: Tensor
    had_gradients: bool
    unscaled: bool = False
    stepped: bool = False
    known: bool | None = None


class GradScaler(LossScaler):
    """Dynamic loss scale: multiplied by `backoff` after an overflow, by `growth` after `interval` clean steps in a row.

    Scale, growth count and overflow flag stay on the device. If an optimizer's kernel takes `grad_scale` and
    `found_inf`, as torch's fused ones do, the kernel unscales and skips. Any other optimizer makes the host wait for
    the device once a step. After 20 overflows in a row the log names the first parameter whose gradient is not finite.

    Args:
        device: where gradients are.
        settings: how the scale starts and moves.

    Attributes:
        trusts_kernels: whether kernels that take `grad_scale` and `found_inf` use them. False on a device whose kernels
            ignore them.
    """

    trusts_kernels = True

    def __init__(self, device: torch.device, settings: LossScale) -> None:
        self._settings, self._has_scaled = settings, False
        self._scale = torch.full((), settings.init, dtype=torch.float32, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._progress: dict[int, _Progress] = {}
        self.streak: OverflowStreak = OverflowStreak()

    def scale(self, loss: Tensor) -> Tensor:
        self._has_scaled = True
        return marked(loss * self._scale)

    def unscale_(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        progress = self._progress.get(id(optimizer))
        if progress is not None and (progress.unscaled or progress.stepped):
            done = "step was" if progress.stepped else "unscale_ was"
            raise TrainingError(
                f"{done} already called for this optimizer since the last update", remedy="call scaler.update() first"
            )
        self._find_overflow(optimizer, gradients, self._scale.double().reciprocal().float(), any_rank).unscaled = True

    def step(self, optimizer: Optimizer, gradients: Given = None, any_rank: AnyRank = None) -> None:
        refuse_closure(gradients)
        progress = self._progress.get(id(optimizer))
        if progress is not None and progress.stepped:
            raise TrainingError("step was called twice since the last update", remedy="call scaler.update() first")
        if self.trusts_kernels and getattr(optimizer, "_step_supports_amp_scaling", False):
            if progress is None or not progress.unscaled:
                progress = self._find_overflow(optimizer, gradients, self._one, any_rank)
            step_in_kernel(optimizer, progress.found, None if progress.unscaled else self._scale)
        else:
            if progress is None or not progress.unscaled:
                self.unscale_(optimizer, gradients, any_rank)
                progress = self._progress[id(optimizer)]
            progress.known = bool(progress.found.item())
            if not progress.known:
                optimizer.step()
            elif hasattr(optimizer, "skip"):  # accelcore's own
                optimizer.skip()
        progress.stepped = True

    def update(self, find_bad: FindBad | None = None, *, captured: bool = False) -> None:
        check_find_bad(find_bad)
        found = self.overflowed
        if found is None:
            raise TrainingError(
                "update was called before step or unscale_, so no gradient was checked for overflow",
                remedy="call scaler.step(optimizer), or unscale_, first",
            )
        progress = self._progress.values()
        if any(each.had_gradients for each in progress):  # else nothing is known about the scale
            settings = self._settings
            torch._amp_update_scale_(
                self._scale, self._clean_steps, found, settings.growth, settings.backoff, settings.interval
            )
            self._scale.clamp_(settings.min, settings.max)
            self._skipped += found
            self.streak.count(found, [each.known for each in progress])
            if not captured:
                self.warn(find_bad or (lambda: _bad_parameter(each.optimizer for each in progress)))
        self.abandon()

    def abandon(self) -> None:
        self._progress = {}

    @property
    def overflowed(self) -> Tensor | None:
        found = [progress.found for progress in self._progress.values()]
        return None if not found else found[0] if len(found) == 1 else torch.stack(found).amax()

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale.item(),
            "growth_factor": self._settings.growth,
            "backoff_factor": self._settings.backoff,
            "growth_interval": self._settings.interval,
            "_growth_tracker": self._clean_steps.item(),
            "skipped": int(self._skipped.item()),
            "dynamic": True,  # torch_npu's scaler requires it
            "version": VERSION,
        }

    def check(self, gradients: Sequence[Tensor], multiplier: Tensor) -> Tensor:
        """Multiply every gradient by `multiplier`, and return 1.0 if one was inf or NaN, else 0.0.

        A device that reports overflows in another way overrides this.
        """
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        alike = by_dtype(gradients)
        if not self.takes_fp16:
            refuse_fp16(alike)
        for dtype, members in alike.items():
            if dtype is torch.bfloat16:  # torch's kernel for CUDA does not take it
                finite = torch.stack([member.isfinite().all() for member in members]).all()
                found = torch.maximum(found, finite.logical_not().float())
                torch._foreach_mul_(list(members), multiplier)
            else:
                torch._amp_foreach_non_finite_check_and_unscale_(list(members), found, multiplier)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, or the state of torch's, torch_npu's or apex's scaler.

        torch's has no count of skipped steps, and apex's only the scale and the count of clean steps. What a state does
        not contain is not changed.
        """
        saved, own = _under_torchs_keys(state), self._settings
        low, high = own.min, own.max
        scale, clean_steps, skipped = saved["scale"], saved["_growth_tracker"], saved.get("skipped", 0)
        values = (
            ("scale", scale, is_number(scale) and 0 <= scale <= torch.finfo(torch.float32).max),
            ("_growth_tracker", clean_steps, is_whole(clean_steps) and clean_steps <= _LARGEST),
            ("skipped", skipped, is_whole(skipped) and skipped <= _LARGEST),
        )
        wrong = [f"{name} is {value!r}" for name, value, valid in values if not valid]
        kept = own.init if wrong else float(max(low, min(scale, high)))
        try:
            settings = replace(
                own,
                init=kept,
                growth=saved.get("growth_factor", own.growth),
                backoff=saved.get("backoff_factor", own.backoff),
                interval=saved.get("growth_interval", own.interval),
            )
        except ConfigurationError as error:
            wrong.append(error.what)
        if wrong:
            raise CheckpointError(
                "the state of the loss scaler has invalid values",
                why="; ".join(wrong),
                remedy="load an unchanged `state_dict()` of a loss scaler",
            )
        if kept != scale:
            logger.warning("the saved loss scale %g is outside %g to %g: continuing with %g", scale, low, high, kept)
        self._settings = settings
        self._scale.fill_(kept)
        self._clean_steps.fill_(clean_steps)
        self._skipped.fill_(skipped)

    def _find_overflow(
        self, optimizer: Optimizer, gradients: Given, multiplier: Tensor, any_rank: AnyRank
    ) -> _Progress:
        given = gradients_of(optimizer, scaled=self._has_scaled) if gradients is None else gradients
        found = self.check(given, multiplier)
        progress = _Progress(
            optimizer, found if any_rank is None else any_rank(found), had_gradients=bool(given) or any_rank is not None
        )
        self._progress[id(optimizer)] = progress
        return progress


def _bad_parameter(optimizers: Iterable[Optimizer]) -> str | None:
    """Return the name or position of the first parameter with an inf or NaN gradient. Waits for the device."""
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None and not is_finite(parameter.grad):
                    names = group.get("param_names")  # given if the optimizer was made from named parameters
                    if names is not None:
                        return str(names[position])
                    return f"parameter {position} of group {number}, of shape {tuple(parameter.shape)}"
    return None


def _under_torchs_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a dynamic scaler's state under torch's keys; raise CheckpointError if it lacks any."""
    check_version(state)
    if set(state) == OF_APEX:
        return {"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]}
    missing = [key for key in _OF_TORCH if key not in state]
    if missing:
        raise CheckpointError(f"the state of the loss scaler lacks {', '.join(sorted(missing))}")
    return state


class Scalers:
    """Factory of loss scalers for one device.

    Args:
        device: where gradients are.
        dynamic: makes a dynamic scaler of a device and its settings.
    """

    def __init__(
        self, device: torch.device, dynamic: Callable[[torch.device, LossScale], LossScaler] = GradScaler
    ) -> None:
        self._device, self._dynamic = device, dynamic

    def create(
        self,
        *,
        init: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        min: float = 1.0,
        max: float = 2.0**24,
        dynamic: bool = True,
        **unknown: Any,
    ) -> LossScaler:
        """Return a scaler. A dynamic one starts at `init`; a static one (`dynamic=False`) keeps `init`.

        Example:
            >>> scaler = accel.scaler.create(init=1024.0)
            >>> scaler.scale(model(batch).mean()).backward()
            >>> scaler.step(optimizer)
            >>> scaler.update()

        Raises:
            ConfigurationError: a setting is `unknown`, or a scale, factor or interval cannot work.
        """
        if unknown:
            LossScale(**unknown)  # raises, and names the known settings
        if not dynamic:
            if not (is_number(init) and 0 < init <= torch.finfo(torch.float32).max):
                raise ConfigurationError(f"{init!r} is not a static loss scale", remedy="give a finite number > 0")
            return StaticScaler(float(init))
        settings = LossScale(init=init, growth=growth, backoff=backoff, interval=interval, min=min, max=max)
        return self._dynamic(self._device, settings)

    def none(self) -> LossScaler:
        """Return the scaler that changes nothing."""
        return NoScaler()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise ConfigurationError for `accel.scaler()`, which a script may write for torch's class `GradScaler`."""
        remedy = "it makes scalers: write scaler = accel.scaler.create() before the loop"
        raise ConfigurationError("accel.scaler is not a class of loss scalers", remedy=remedy)


def is_finite(gradient: Tensor) -> bool:
    """Return whether all values are finite. Waits for the device."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
