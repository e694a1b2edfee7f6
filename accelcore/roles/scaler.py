"""Loss scaling: keeping small fp16 gradients representable, and skipping a step that overflowed.

One implementation for every device. It follows torch.amp.GradScaler (Micikevicius et al., "Mixed Precision
Training", 2018, section 3.2): same defaults, order of calls and state, with two differences. The scale is kept within
`[min, max]`, so that an endless overflow cannot drive it to zero and turn the next clean step into NaN; and it works
on whatever device the gradients are on.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, ConfigurationError, TrainingError

__all__ = ["Agree", "GradScaler", "LossScaler", "NoScaler", "Scalers", "SkippingOptimizer", "StaticScaler"]


logger = logging.getLogger("accelcore")


@runtime_checkable
class SkippingOptimizer(Protocol):
    """An optimizer that is told of a step that is skipped, as those of accelcore are."""

    def skip(self) -> None:
        """Update nothing."""


Agree = Callable[[Tensor], Tensor]
"""Given 1.0 where this rank found an overflow: 1.0 where any rank did."""


class LossScaler(ABC):
    """What a training step asks of a scaler, in order: `scale`, `unscale_` where gradients are read, `step`, `update`.

    With several optimizers each is unscaled and stepped in its turn, and `update` closes the step for all.

    `unscale_` and `step` look at the gradients of the optimizer's parameters, or at those they are given: a trainer
    knows in which pieces of memory they are, and whether the ranks have to agree on an overflow.

    Attributes:
        reads_gradients: whether it looks at them at all.
    """

    reads_gradients = True

    @abstractmethod
    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""

    @abstractmethod
    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        """Divide the gradients by the scale in place; needed before gradients are clipped or read."""

    @abstractmethod
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        """Update the parameters with unscaled gradients, unless a gradient overflowed."""

    @abstractmethod
    def update(self) -> None:
        """Choose the next scale. Once a step, after the last optimizer."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State in the layout of torch.amp.GradScaler; empty where there is none."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; raises CheckpointError where the state is not of this kind of scaler."""

    def abandon(self) -> None:  # noqa: B027  # most remember nothing
        """Forget a step that was begun and failed, so that the next can begin."""

    @property
    def overflowed(self) -> Tensor | None:
        """1.0 where a gradient of this step overflowed, between `unscale_` or `step` and `update`; None: not known."""
        return None

    @property
    def skipped(self) -> int:
        """Number of updates skipped so far. Reading it waits for the device."""
        return 0


class NoScaler(LossScaler):
    """The scaler of fp32 and bf16, whose exponent range needs none."""

    reads_gradients = False

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        pass

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        optimizer.step()

    def update(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise CheckpointError(
                "the checkpoint holds the state of a loss scaler, and this training uses none",
                remedy="train with the precision the checkpoint was made with",
            )


class StaticScaler(NoScaler):
    """A fixed loss scale: never looks for overflow, never skips (as apex with a number for `loss_scale`)."""

    reads_gradients = True

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._unscaled: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        if id(optimizer) in self._unscaled:
            raise TrainingError("unscale_ was called twice for one optimizer since the last update")
        given = list(_gradients(optimizer)) if gradients is None else list(gradients)
        _refuse_fp16(given)
        self._unscaled.add(id(optimizer))
        if given:
            torch._foreach_mul_(given, 1.0 / self._scale)

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer, gradients)
        optimizer.step()

    def update(self) -> None:
        self._unscaled.clear()

    def abandon(self) -> None:
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"scale"}:
            raise CheckpointError(f"the checkpoint holds no static loss scale but {sorted(state) or 'none at all'}")
        if state["scale"] != self._scale:
            raise CheckpointError(
                f"the checkpoint was saved with loss_scale={state['scale']}, and this training has {self._scale}",
                remedy="train with the loss scale the checkpoint was made with",
            )


class _Stage(Enum):
    SCALED = auto()
    UNSCALED = auto()
    STEPPED = auto()


class GradScaler(LossScaler):
    """Dynamic loss scale: multiplied by `backoff` after an overflow, by `growth` after `interval` clean steps.

    Scale, growth tracker and overflow flag stay on the device. An optimizer whose kernel takes `grad_scale` and
    `found_inf` (torch's fused ones) unscales and skips inside the kernel, without a host synchronisation; any other
    needs one a step.

    Attributes:
        trusts_kernels: whether such a kernel is believed. A device whose kernels take both and use neither says no.
    """

    trusts_kernels = True

    def __init__(
        self,
        device: torch.device,
        *,
        init: float,
        growth: float,
        backoff: float,
        interval: int,
        min: float,
        max: float,
    ) -> None:
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.min, self.max = min, max
        self._scale = torch.full((), init, dtype=torch.float32, device=device)
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
        torch._amp_update_scale_(self._scale, self._clean_steps, found, self.growth, self.backoff, self.interval)
        self._scale.clamp_(self.min, self.max)
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
            "growth_factor": self.growth,
            "backoff_factor": self.backoff,
            "growth_interval": self.interval,
            "_growth_tracker": self._clean_steps.item(),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Also takes a state of torch.amp.GradScaler, which counts no skipped steps, and ignores what others add.
        missing = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(state)
        if missing:
            raise CheckpointError(f"the state of the loss scaler lacks {', '.join(sorted(missing))}")
        try:
            scale, growth, backoff = (float(state[key]) for key in ("scale", "growth_factor", "backoff_factor"))
            interval, clean_steps = int(state["growth_interval"]), int(state["_growth_tracker"])
            skipped = int(state.get("skipped", 0))
            kept = max(self.min, min(scale, self.max))
            if not (0 <= scale < math.inf and clean_steps >= 0 and skipped >= 0):
                raise ValueError(f"scale={scale}, _growth_tracker={clean_steps}, skipped={skipped}")
            _check(kept, growth, backoff, interval, self.min, self.max)
        except (TypeError, ValueError) as error:
            raise CheckpointError("the state of the loss scaler makes no sense", why=str(error)) from error
        if kept != scale:
            logger.warning(
                "the saved loss scale %g is outside %g to %g: going on with %g", scale, self.min, self.max, kept
            )
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self._scale.fill_(kept)
        self._clean_steps.fill_(clean_steps)
        self._skipped.fill_(skipped)

    @property
    def skipped(self) -> int:
        return int(self._skipped.item())

    def _look(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None, multiplier: Tensor, agree: Agree | None
    ) -> None:
        found = self._check(list(_gradients(optimizer)) if gradients is None else gradients, multiplier)
        self._overflows[id(optimizer)] = found if agree is None else agree(found)

    def _check(self, gradients: Sequence[Tensor], multiplier: Tensor) -> Tensor:
        """Multiply every gradient by `multiplier`; 1.0 where one was inf or NaN, else 0.0."""
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        alike: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            alike[gradient.dtype].append(gradient)
        _refuse_fp16(gradients)
        for members in alike.values():
            torch._amp_foreach_non_finite_check_and_unscale_(members, found, multiplier)
        return found

    def _step_in_kernel(self, optimizer: Any, scale: Tensor | None) -> None:
        optimizer.grad_scale, optimizer.found_inf = scale, self._overflows[id(optimizer)]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


class Scalers:
    """Makes loss scalers for one device.

    Args:
        device: where gradients are.
        dynamic: makes the dynamic ones, from the device and the settings of `create`.
    """

    def __init__(self, device: torch.device, dynamic: Callable[..., LossScaler] = GradScaler) -> None:
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
    ) -> LossScaler:
        """Make a scaler. A dynamic one starts at `init`; a static one (`dynamic=False`) keeps `init` for ever.

        Raises:
            ConfigurationError: a scale, factor or interval that could never work.
        """
        if not dynamic:
            if not 0 < init < math.inf:
                raise ConfigurationError(f"a static loss scale of {init} makes no sense", remedy="give a number > 0")
            return StaticScaler(float(init))
        _check(init, growth, backoff, interval, min, max)
        return self._dynamic(
            self._device, init=init, growth=growth, backoff=backoff, interval=interval, min=min, max=max
        )  # fmt: skip

    def none(self) -> LossScaler:
        """The scaler that leaves everything as it is."""
        return NoScaler()


def _check(init: float, growth: float, backoff: float, interval: int, low: float, high: float) -> None:
    whole = isinstance(interval, int) and interval >= 1
    if not (0 < low <= init <= high < math.inf and 1 < growth < math.inf and 0 < backoff < 1 and whole):
        raise ConfigurationError(
            f"no loss scaler has init={init}, growth={growth}, backoff={backoff}, interval={interval}, "
            f"min={low}, max={high}",
            remedy="choose 0 < min <= init <= max, growth > 1, 0 < backoff < 1 and a whole interval >= 1",
        )


def _refuse_fp16(gradients: Iterable[Tensor]) -> None:
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise TrainingError(
            "the gradients are fp16, and dividing them by the loss scale in fp16 would lose the small ones",
            remedy="keep the parameters in fp32 and let autocast choose the dtype of each operator, or train fp32 "
            'masters: precision=Policy(model_dtype="float16", loss_scale="dynamic")',
        )


def _gradients(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient._values() if gradient.is_sparse else gradient
