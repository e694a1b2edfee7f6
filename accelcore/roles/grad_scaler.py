"""The dynamic loss scale: one implementation for every device.

It follows torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): same defaults,
order of calls and state, with two differences. The scale is kept within `[min, max]`, so that an endless overflow
cannot drive it to zero and turn the next clean step into NaN; and it works on whatever device the gradients are on.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError
from accelcore.roles.loss_scale import LossScale
from accelcore.roles.loss_scaler import Agree, LossScaler, SkippingOptimizer, gradients_of, refuse_fp16

__all__ = ["GradScaler"]

logger = logging.getLogger("accelcore")


class _Stage(Enum):
    SCALED = auto()
    UNSCALED = auto()
    STEPPED = auto()


class GradScaler(LossScaler):
    """Dynamic loss scale: multiplied by `backoff` after an overflow, by `growth` after `interval` clean steps in a row.

    Scale, growth tracker and overflow flag stay on the device. An optimizer whose kernel takes `grad_scale` and
    `found_inf` (torch's fused ones) unscales and skips inside the kernel, without a host synchronisation; any other
    needs one a step.

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
        self._skipped = torch.zeros((), dtype=torch.int32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._stages: dict[int, _Stage] = defaultdict(lambda: _Stage.SCALED)
        self._overflows: dict[int, Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        stage = self._stages[id(optimizer)]
        if stage is not _Stage.SCALED:
            done = "unscale_ was already called" if stage is _Stage.UNSCALED else "step was already called"
            raise TrainingError(f"{done} for this optimizer since the last update", remedy="call scaler.update() first")
        self._look(optimizer, gradients, self._scale.double().reciprocal().float(), agree)
        self._stages[id(optimizer)] = _Stage.UNSCALED

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        key = id(optimizer)
        stage = self._stages[key]
        if stage is _Stage.STEPPED:
            raise TrainingError("step was called twice since the last update", remedy="call scaler.update() first")
        if self.trusts_kernels and getattr(optimizer, "_step_supports_amp_scaling", False):
            if stage is _Stage.SCALED:
                self._look(optimizer, gradients, self._one, agree)
            self._step_in_kernel(optimizer, None if stage is _Stage.UNSCALED else self._scale)
        else:
            if stage is _Stage.SCALED:
                self.unscale_(optimizer, gradients, agree)
            if not self._overflows[key].item():
                optimizer.step()
            elif isinstance(optimizer, SkippingOptimizer):
                optimizer.skip()
        self._stages[key] = _Stage.STEPPED

    def update(self) -> None:
        if not self._overflows:
            raise TrainingError(
                "update was called before any gradient was looked at",
                remedy="call scaler.step(optimizer), or unscale_, first",
            )
        found = torch.stack(list(self._overflows.values())).amax()
        moves = self._settings
        torch._amp_update_scale_(self._scale, self._clean_steps, found, moves.growth, moves.backoff, moves.interval)
        self._scale.clamp_(moves.min, moves.max)
        self._skipped += found.to(torch.int32)
        self.abandon()

    def abandon(self) -> None:
        self._overflows.clear()
        self._stages.clear()

    @property
    def overflowed(self) -> Tensor | None:
        found = list(self._overflows.values())
        return torch.stack(found).amax() if found else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self._scale.item(),
            "growth_factor": self._settings.growth,
            "backoff_factor": self._settings.backoff,
            "growth_interval": self._settings.interval,
            "_growth_tracker": self._clean_steps.item(),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, or that of torch's, torch_npu's or apex's scaler, as far as it goes.

        torch's counts no skipped steps, torch_npu's says besides that it is dynamic, and apex's has only the scale and
        the clean steps: what a state does not say stays as it is here.
        """
        theirs = _as_torch_writes(state)
        mine = self._settings
        low, high = mine.min, mine.max
        try:
            scale, clean_steps = float(theirs["scale"]), int(theirs["_growth_tracker"])
            skipped = int(theirs.get("skipped", 0))
            kept = max(low, min(scale, high))
            if not (0 <= scale < math.inf and clean_steps >= 0 and skipped >= 0):
                raise ValueError(f"scale={scale}, _growth_tracker={clean_steps}, skipped={skipped}")
            settings = replace(
                mine,
                init=kept,
                growth=float(theirs.get("growth_factor", mine.growth)),
                backoff=float(theirs.get("backoff_factor", mine.backoff)),
                interval=int(theirs.get("growth_interval", mine.interval)),
            )
        except (TypeError, ValueError, ConfigurationError) as error:
            raise CheckpointError("the state of the loss scaler makes no sense", why=str(error)) from error
        if kept != scale:
            logger.warning("the saved loss scale %g is outside %g to %g: going on with %g", scale, low, high, kept)
        self._settings = settings
        self._scale.fill_(kept)
        self._clean_steps.fill_(clean_steps)
        self._skipped.fill_(skipped)

    @property
    def skipped(self) -> int:
        return int(self._skipped.item())

    def _look(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None, multiplier: Tensor, agree: Agree | None
    ) -> None:
        found = self._check(list(gradients_of(optimizer)) if gradients is None else gradients, multiplier)
        self._overflows[id(optimizer)] = found if agree is None else agree(found)

    def _check(self, gradients: Sequence[Tensor], multiplier: Tensor) -> Tensor:
        """Multiply every gradient by `multiplier`; 1.0 where one was inf or NaN, else 0.0."""
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            alike[gradient.dtype].append(gradient)
        refuse_fp16(gradients)
        for members in alike.values():
            torch._amp_foreach_non_finite_check_and_unscale_(members, found, multiplier)
        return found

    def _step_in_kernel(self, optimizer: Any, scale: Tensor | None) -> None:
        optimizer.grad_scale, optimizer.found_inf = scale, self._overflows[id(optimizer)]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


def _as_torch_writes(state: dict[str, Any]) -> dict[str, Any]:
    """A state under torch's keys."""
    if set(state) == {"loss_scale", "unskipped"}:
        return {"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]}
    missing = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(state)
    if missing:
        raise CheckpointError(f"the state of the loss scaler lacks {', '.join(sorted(missing))}")
    return state
