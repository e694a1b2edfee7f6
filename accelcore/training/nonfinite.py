"""Check that the trained parameters stay finite: every few windows, when an epoch ends, and before they are saved."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.scaling.dynamic import is_finite
from accelcore.training.gradients import Gradients, by_slot
from accelcore.training.plan import Plan

_EVERY = 64  # windows: reading all parameters in each would make small steps slower
_SMALL = 1024  # bytes; a loss that is a view of more would keep that memory


class FiniteCheck:
    """Look for NaN and inf in the parameters or masters: often in the first windows, later in every 64th.

    The host reads the result of a look one window later, so that the device never waits for the host.
    """

    losses: deque[tuple[int, Tensor]]  # window and loss of each of the last micro-batches
    due: float  # the window after which `window_ended` is to be called next; inf if there is no check

    def __init__(self, plan: Plan, steps: int) -> None:
        self._plan = plan
        self._wanted = plan.options["on_nonfinite"] is not None and len(plan.gradients.values) > 0
        self.losses = deque(maxlen=2 * _EVERY * plan.options["accumulate"])
        self.begin(steps)

    def begin(self, steps: int) -> None:
        """Continue with other parameters, after `steps` windows."""
        self.losses.clear()
        self._arriving: Callable[[], Tensor] | None = None
        self._began, self.due = steps, steps + 1 if self._wanted else math.inf

    def window_ended(self, steps: int) -> None:
        """Look at the parameters, or raise TrainingError if the last look found one that is not finite."""
        if self._arriving is None:
            if self.losses and self.losses[-1][1].untyped_storage().nbytes() > _SMALL:
                self.losses = deque(maxlen=0)
            self._arriving, self.due = self._plan.backend.runtime.fetch(self._found(agree=True)), steps + 1
            return
        found, self._arriving = self._arriving().numpy(), None
        self.due = steps + min(steps - self._began, _EVERY)
        if found:
            self._examine(steps, agree=True)

    def check(self, steps: int, *, agree: bool = True) -> None:
        """Raise TrainingError if a parameter is not finite after `steps` windows. Waits for the device.

        If `agree`, every rank that has shards makes this call, and all raise.
        """
        if self._wanted and self._found(agree=agree).item():
            self._examine(steps, agree=agree)
        if self._wanted and (bad := self._bad_losses()):
            self._plan.log.warn(
                "the loss of step %d is %s, and the parameters are finite: such batches may train nothing. A "
                "cross-entropy is NaN if each label of a batch is ignore_index",
                *bad[0],
            )

    @torch.no_grad()
    def _found(self, *, agree: bool) -> Tensor:
        """Return 1.0 if the norm of the parameters is not finite, else 0.0."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(self._plan.gradients.values))))
        found = (~norm.isfinite()).float()
        return self._plan.strategy.agree(found) if agree else found

    def _examine(self, steps: int, *, agree: bool) -> None:
        gradients = self._plan.gradients
        name = first_not_finite(gradients, gradients.values)  # None if only the norm has overflowed
        found = torch.tensor(float(name is not None), device="cpu")
        if (self._plan.strategy.agree(found) if agree else found).item():
            raise TrainingError(
                f"after step {steps}, {'a parameter of another rank' if name is None else f'the parameter {name!r}'} "
                "has values that are NaN or inf",
                why=self._first_bad_loss(),
                remedy="resume from a checkpoint. Look for a NaN in the batch, a division by 0 or the root of 0; lower "
                'the learning rate, or set clip_norm=. on_nonfinite="skip" skips an update whose gradients are not '
                "finite; on_nonfinite=None never checks",
            )

    def _first_bad_loss(self) -> str:
        """Return which of the last losses was the first that is not finite."""
        if not self.losses:
            return ""
        bad = self._bad_losses()
        where = " on this rank" if self._plan.backend.collectives.world_size > 1 else ""
        if not bad:
            return f"the losses{where} of the last {len(self.losses)} micro-batches were finite"
        return f"the first loss{where} that was not finite is that of step {bad[0][0]}: {bad[0][1]}"

    def _bad_losses(self) -> list[tuple[int, float]]:
        losses = [loss.detach().reshape(()).to(self.losses[0][1].device) for _, loss in self.losses]
        values = torch.stack(losses).tolist() if losses else []  # one copy to the host
        return [(step, value) for (step, _), value in zip(self.losses, values, strict=True) if not math.isfinite(value)]


def first_not_finite(gradients: Gradients, tensors: Sequence[Tensor | None]) -> str | None:
    """Return the name of the first slot whose tensor has an inf or NaN, of tensors laid out as `gradients.values`.

    Waits for the device.
    """
    pairs = zip(gradients.slots, by_slot(gradients, tensors), strict=True)
    return next((slot.name for slot, tensor in pairs if tensor is not None and not is_finite(tensor)), None)
