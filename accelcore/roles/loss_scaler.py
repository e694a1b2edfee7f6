"""The contract of loss scalers, and the two that never look for an overflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, TrainingError

__all__ = [
    "Agree",
    "LossScaler",
    "NoScaler",
    "SkippingOptimizer",
    "StaticScaler",
    "gradients_of",
    "refuse_fp16",
]


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
        given = list(gradients_of(optimizer)) if gradients is None else list(gradients)
        refuse_fp16(given)
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
        if set(state) not in ({"scale"}, {"loss_scale", "unskipped"}):  # the latter is how apex writes it
            raise CheckpointError(f"the checkpoint holds no static loss scale but {sorted(state) or 'none at all'}")
        saved = state.get("scale", state.get("loss_scale"))
        if saved != self._scale:
            raise CheckpointError(
                f"the checkpoint was saved with loss_scale={saved}, and this training has {self._scale}",
                remedy="train with the loss scale the checkpoint was made with",
            )


def refuse_fp16(gradients: Iterable[Tensor]) -> None:
    """Raise TrainingError where a gradient is fp16."""
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        raise TrainingError(
            "the gradients are fp16, and dividing them by the loss scale in fp16 would lose the small ones",
            remedy="keep the parameters in fp32 and let autocast choose the dtype of each operator, or train fp32 "
            'masters: precision=Policy(model_dtype="float16", loss_scale="dynamic")',
        )


def gradients_of(optimizer: Optimizer) -> Iterable[Tensor]:
    """The dense gradients of an optimizer's parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield gradient._values() if gradient.is_sparse else gradient
