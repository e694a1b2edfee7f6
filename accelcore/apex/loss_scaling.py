"""One loss scaler as apex has it: it unscales after each backward pass, and optimizers step later, by themselves."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.errors import CheckpointError
from accelcore.roles.loss_scale import LossScale
from accelcore.roles.loss_scaler import Agree, LossScaler
from accelcore.roles.scaled_gradients import FindBad
from accelcore.training.policy import Policy, create_scaler

__all__ = ["AmpScaler"]

logger = logging.getLogger("accelcore")


class AmpScaler:
    """The scale of one of a script's losses.

    Args:
        backend: of the device that losses are on.
        loss_scale: a number for a static scale, or how a dynamic one moves.

    Attributes:
        dynamic: whether it looks for overflows, and moves.
        passes: backward passes that moved it, or could have.
        trusts_kernels: whether an optimizer's kernel may skip an overflowed step by itself.
    """

    # A script that sets what apex's scalers have besides, such as `_scale_seq_len`, gets an error, and not nothing.
    __slots__ = ("_scaler", "_unchecked", "dynamic", "passes", "trusts_kernels")

    def __init__(self, backend: Backend, loss_scale: float | LossScale) -> None:
        self.dynamic = isinstance(loss_scale, LossScale)
        wanted = None if loss_scale == 1.0 else loss_scale
        self._scaler: LossScaler = create_scaler(backend.scaler, Policy(loss_scale=wanted))
        self.trusts_kernels = bool(getattr(self._scaler, "trusts_kernels", False))
        self._scaler.takes_fp16 = True  # where there are no masters, as at O3; others are unscaled in fp32
        self.passes = 0
        self._unchecked: Tensor | None = None

    def loss_scale(self) -> float:
        """The scale now. Where it is dynamic, this waits for the device."""
        return float(self._scaler.state_dict().get("scale", 1.0))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on, in fp32."""
        return self._scaler.scale(loss.float())

    def unscale(self, optimizer: Optimizer, gradients: list[Tensor], agree: Agree) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, in place, and look at them."""
        self._scaler.unscale_(optimizer, gradients, lambda found: self._with_unchecked(agree(found)))

    def close(self, find_bad: FindBad, *, delay: bool) -> Tensor | None:
        """The backward pass is over, and the gradients of all its optimizers are unscaled.

        Args:
            find_bad: names the first parameter whose gradient is not finite.
            delay: leave it to the next pass to consider what was found in this one.

        Returns:
            1.0 where a gradient overflowed; None where nobody looked.
        """
        found = self._scaler.overflowed
        if delay:
            self._unchecked = found
            self._scaler.abandon()
            return None
        self._unchecked = None
        self._scaler.update(find_bad)
        self.passes += 1
        return found

    def abandon(self) -> None:
        """Forget a backward pass that failed."""
        self._scaler.abandon()

    def state(self) -> dict[str, Any]:
        """Its state as apex writes it."""
        state = self._scaler.state_dict()
        return {"loss_scale": state.get("scale", 1.0), "unskipped": state.get("_growth_tracker", 0)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state as apex writes it. A static scale stays as it is here, and that is said.

        Raises:
            CheckpointError: it is no such state.
        """
        if set(state) != {"loss_scale", "unskipped"}:
            raise CheckpointError(
                f"the state of a loss scaler has {', '.join(sorted(map(str, state))) or 'nothing'}",
                available="loss_scale and unskipped, as amp.state_dict() has them",
            )
        if self.dynamic:
            self._scaler.load_state_dict(state)
        elif state["loss_scale"] != self.loss_scale():
            logger.warning(
                "the saved loss scale %g is dropped: this run has loss_scale=%g", state["loss_scale"], self.loss_scale()
            )

    def _with_unchecked(self, found: Tensor) -> Tensor:
        return found if self._unchecked is None else torch.maximum(found, self._unchecked)
