"""The contract of loss scalers, and the two that never look for an overflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError, TrainingError
from accelcore.roles.scaled_gradients import FindBad, by_dtype, gradients_of, refuse_fp16
from accelcore.roles.scaler_state import VERSION, is_static, static_scale

__all__ = ["Agree", "LossScaler", "NoScaler", "SkippingOptimizer", "StaticScaler", "refuse_closure"]


@runtime_checkable
class SkippingOptimizer(Protocol):
    """An optimizer that is told of a step that is skipped, as those of accelcore are."""

    def skip(self) -> None:
        """Update nothing."""


Agree = Callable[[Tensor], Tensor]
"""Given 1.0 where this rank found an overflow: 1.0 where any rank did."""


class LossScaler(ABC):
    """What a training step asks of a scaler, in order: `scale`, `unscale_` where gradients are read, `step`, `update`.

    With several optimizers each is unscaled and stepped in its turn, and `update` closes the step for all: the scale is
    one, and of the optimizers only those are skipped whose own gradients overflowed. An optimizer that needs a closure
    cannot be stepped: it computes its loss again and again within a step.

    `unscale_` and `step` look at the gradients of the optimizer's parameters, or at those they are given: a trainer
    knows in which pieces of memory they are, and whether the ranks have to agree on an overflow.

    Attributes:
        reads_gradients: whether it looks at them at all.
        takes_fp16: whether gradients may be fp16, which is refused otherwise: divided by the scale in fp16, small ones
            are lost. To be set by those who know.
    """

    reads_gradients = True
    takes_fp16 = False

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
    def update(self, find_bad: FindBad | None = None) -> None:
        """Choose the next scale. Once a step, after the last optimizer.

        Args:
            find_bad: names the first parameter whose gradient is not finite; None looks among the optimizers'.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State in the layout of torch.amp.GradScaler, which loads it, and a version; empty where there is none."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises CheckpointError where the state is not of this kind of scaler."""

    def takes(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this kind of scaler, whole or not: another kind's has nothing to restore here."""
        return bool(state) == bool(self.state_dict())

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
        refuse_closure(gradients)
        optimizer.step()

    def update(self, find_bad: FindBad | None = None) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        self._inverses: dict[tuple[torch.dtype, torch.device], float | Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def unscale_(
        self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None
    ) -> None:
        if id(optimizer) in self._unscaled:
            raise TrainingError("unscale_ was called twice for one optimizer since the last update")
        given = by_dtype(gradients_of(optimizer) if gradients is None else gradients)
        if not self.takes_fp16:
            refuse_fp16(given)
        self._unscaled.add(id(optimizer))
        for members in given.values():
            torch._foreach_mul_(members, self._inverse(members[0]))  # type: ignore[call-overload]

    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor] | None = None, agree: Agree | None = None) -> None:
        refuse_closure(gradients)
        if id(optimizer) not in self._unscaled:
            self.unscale_(optimizer, gradients)
        optimizer.step()

    def update(self, find_bad: FindBad | None = None) -> None:
        self._unscaled.clear()

    def abandon(self) -> None:
        self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "dynamic": False, "version": VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = static_scale(state)
        if saved != self._scale:
            raise CheckpointError(
                f"the checkpoint was saved with loss_scale={saved}, and this training has {self._scale}",
                remedy="train with the loss scale the checkpoint was made with",
            )

    def takes(self, state: Mapping[str, Any]) -> bool:
        return is_static(state) and static_scale(state) == self._scale

    def _inverse(self, like: Tensor) -> float | Tensor:
        """What to multiply by: a tensor, for which there are quicker kernels, where its dtype is exact enough."""
        key = like.dtype, like.device
        if key not in self._inverses:
            exact = like.dtype.itemsize >= 4
            self._inverses[key] = torch.full((), 1 / self._scale).to(like) if exact else 1 / self._scale
        return self._inverses[key]


def refuse_closure(gradients: object) -> None:
    """Raise TrainingError where a closure was given to `step`, as torch's optimizers take one."""
    if callable(gradients):
        raise TrainingError(
            "a loss scaler cannot step an optimizer with a closure",
            why="a closure computes the loss again within a step, which is scaled and unscaled once",
            remedy="compute the loss before step, or train in fp32 or bf16, which need no loss scale",
        )
