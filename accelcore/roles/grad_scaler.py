"""The dynamic loss scale: one implementation for every device.

It follows torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): same defaults,
order of calls and state, with two differences. The scale is kept within `[min, max]`, so that an endless overflow
cannot drive it to zero and turn the next clean step into NaN; and it works on whatever device the gradients are on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError
from accelcore.roles.loss_scale import LossScale
from accelcore.roles.loss_scaler import Agree, LossScaler, SkippingOptimizer, refuse_closure
from accelcore.roles.overflow_streak import OverflowStreak
from accelcore.roles.scaled_gradients import FindBad, by_dtype, first_not_finite, gradients_of, refuse_fp16
from accelcore.roles.scaler_state import VERSION, as_torch_writes, is_static

__all__ = ["GradScaler"]

logger = logging.getLogger("accelcore")


class _Stage(Enum):
    SCALED = auto()
    UNSCALED = auto()
    STEPPED = auto()


@dataclass
class _Progress:
    """How far an optimizer is in this step; `known`: whether it overflowed, where the host has read that."""

    optimizer: Optimizer
    found: Tensor
    had_gradients: bool
    stage: _Stage = _Stage.SCALED
    known: bool | None = None


class GradScaler(LossScaler):
    """Dynamic loss scale: multiplied by `backoff` after an overflow, by `growth` after `interval` clean steps in a row.

    Scale, growth tracker and overflow flag stay on the device. An optimizer whose kernel takes `grad_scale` and
    `found_inf` (torch's fused ones) unscales and skips inside the kernel, without a host synchronisation; any other
    needs one a step. After 20 overflows in a row the log names the first parameter whose gradient is not finite.

    Args:
        device: where gradients are.
        settings: how the scale starts and moves.

    Attributes:
        trusts_kernels: whether such a kernel is believed. A device whose kernels take both and use neither says no.
    """

    trusts_kernels = True

    def __init__(self, device: torch.device, settings: LossScale) -> None:
        self._settings = settings
        self._scale = torch.full((), settings.init, dtype=torch.float32, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._progress: dict[int, _Progress] = {}
        self._streak = OverflowStreak(device)

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        stage = self._stage(optimizer)
        if stage is not _Stage.SCALED:
            done = "unscale_ was already called" if stage is _Stage.UNSCALED else "step was already called"
            raise TrainingError(f"{done} for this optimizer since the last update", remedy="call scaler.update() first")
        self._look(optimizer, gradients, self._scale.double().reciprocal().float(), agree)
        self._progress[id(optimizer)].stage = _Stage.UNSCALED

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        refuse_closure(gradients)
        stage = self._stage(optimizer)
        if stage is _Stage.STEPPED:
            raise TrainingError("step was called twice since the last update", remedy="call scaler.update() first")
        if self.trusts_kernels and getattr(optimizer, "_step_supports_amp_scaling", False):
            if stage is _Stage.SCALED:
                self._look(optimizer, gradients, self._one, agree)
            progress = self._progress[id(optimizer)]
            _step_in_kernel(optimizer, None if stage is _Stage.UNSCALED else self._scale, progress.found)
        else:
            if stage is _Stage.SCALED:
                self.unscale_(optimizer, gradients, agree)
            progress = self._progress[id(optimizer)]
            progress.known = bool(progress.found.item())
            if not progress.known:
                optimizer.step()
            elif isinstance(optimizer, SkippingOptimizer):
                optimizer.skip()
        progress.stage = _Stage.STEPPED

    def update(self, find_bad: FindBad | None = None) -> None:
        found = self.overflowed
        if found is None:
            raise TrainingError(
                "update was called before any gradient was looked at",
                remedy="call scaler.step(optimizer), or unscale_, first",
            )
        steps = self._progress.values()
        if any(step.had_gradients for step in steps):  # else nothing was seen of how the scale fits
            settings = self._settings
            torch._amp_update_scale_(
                self._scale, self._clean_steps, found, settings.growth, settings.backoff, settings.interval
            )
            self._scale.clamp_(settings.min, settings.max)
            self._skipped += found
            optimizers = [step.optimizer for step in steps]
            in_a_row = self._streak.add(found, _known(steps))
            self._streak.tell(in_a_row, self._scale, find_bad or partial(first_not_finite, optimizers))
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
            "skipped": self.skipped,
            "dynamic": True,  # torch_npu's asks for it
            "version": VERSION,
        }

    def check(self, gradients: Sequence[Tensor], multiplier: Tensor) -> Tensor:
        """Multiply every gradient by `multiplier`; 1.0 where one was inf or NaN, else 0.0.

        A device that reports overflows in a way of its own overrides this.
        """
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        alike = by_dtype(gradients)
        if not self.takes_fp16:
            refuse_fp16(alike)
        for members in alike.values():
            torch._amp_foreach_non_finite_check_and_unscale_(list(members), found, multiplier)
        return found

    def takes(self, state: Mapping[str, Any]) -> bool:
        return bool(state) and (set(state) == {"loss_scale", "unskipped"} or not is_static(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, or that of torch's, torch_npu's or apex's scaler, as far as it goes.

        torch's counts no skipped steps, torch_npu's says besides that it is dynamic, and apex's has only the scale and
        the clean steps: what a state does not say stays as it is here.
        """
        saved, own = as_torch_writes(state), self._settings
        low, high = own.min, own.max
        try:
            scale, clean_steps = float(saved["scale"]), int(saved["_growth_tracker"])
            skipped = int(saved.get("skipped", 0))
            kept = max(low, min(scale, high))
            if not (0 <= scale < math.inf and clean_steps >= 0 and skipped >= 0):
                raise ValueError(f"scale={scale}, _growth_tracker={clean_steps}, skipped={skipped}")
            settings = replace(
                own,
                init=kept,
                growth=float(saved.get("growth_factor", own.growth)),
                backoff=float(saved.get("backoff_factor", own.backoff)),
                interval=int(saved.get("growth_interval", own.interval)),
            )
        except (TypeError, ValueError, ConfigurationError) as error:
            raise CheckpointError(
                "the state of the loss scaler has values that no scaler has",
                why=str(error),
                remedy="load a state as `state_dict` gave it, or leave the scaler as it is",
            ) from error
        if kept != scale:
            logger.warning("the saved loss scale %g is outside %g to %g: going on with %g", scale, low, high, kept)
        self._settings = settings
        self._scale.fill_(kept)
        self._clean_steps.fill_(clean_steps)
        self._skipped.fill_(skipped)

    @property
    def skipped(self) -> int:
        return int(self._skipped.item())

    def _stage(self, optimizer: Optimizer) -> _Stage:
        progress = self._progress.get(id(optimizer))
        return _Stage.SCALED if progress is None else progress.stage

    def _look(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None, multiplier: Tensor, agree: Agree | None
    ) -> None:
        given = gradients_of(optimizer) if gradients is None else gradients
        found = self.check(given, multiplier)
        self._progress[id(optimizer)] = _Progress(
            optimizer, found if agree is None else agree(found), had_gradients=bool(given) or agree is not None
        )


def _step_in_kernel(optimizer: Any, scale: Tensor | None, found: Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = scale, found
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _known(steps: Collection[_Progress]) -> bool | None:
    """Whether one overflowed; None where that is only known to the device."""
    if any(step.known is None for step in steps):
        return None
    return any(step.known for step in steps)
