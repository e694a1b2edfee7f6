"""One training step: what is done with a micro-batch, and what at the end of a window."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.nested import detached
from accelcore.optim.fused_kernels import FusedStep
from accelcore.optim.optimizer import Optimizer as LateBound
from accelcore.roles.scaler import LossScaler
from accelcore.training.captured import CapturedStep
from accelcore.training.clipping import Clipping, ClippingBy
from accelcore.training.gradients import backward, first_not_finite
from accelcore.training.losses import loss_of_model, no_loss, split_loss
from accelcore.training.plan import Plan
from accelcore.training.turns import Turn
from accelcore.training.unable import half_updated, parted
from accelcore.training.window import Window

__all__ = ["Step"]

logger = logging.getLogger("accelcore")


class Step:
    """Trains on micro-batches, and updates the parameters at the end of a window.

    Everything it needs was bound when it was made: it walks neither the model nor the optimizer's groups.

    Args:
        plan: what the training is made of.
        scaler, window: what it composes with that.
        clip: clips the gradients; None: they are not clipped.

    Attributes:
        overwrites: whether what the model returns, and gradients it gives, are memory that its next call writes anew.
        failure: why no step can be made any more; None where one can.
    """

    def __init__(self, plan: Plan, *, scaler: LossScaler, window: Window, clip: Clipping | None) -> None:
        self._forward, self._listeners = plan.forward, plan.listeners
        self._loss, self._weight = plan.options["loss"] or loss_of_model, plan.options["weight"]
        self._region, self._arithmetic = plan.contexts.region, plan.contexts.arithmetic
        self._gradients, self._optimizer, self._strategy = plan.gradients, plan.optimizer, plan.strategy
        self._scaler, self._window, self._clip = scaler, window, clip
        self._find_bad = partial(first_not_finite, plan.gradients)
        self._exposes = not isinstance(plan.optimizer, LateBound)  # others know nothing of slots
        # A scaler that reads gradients may skip. A captured step has to be torch's, which checks what a graph bakes in.
        fused = plan.captured is None and not scaler.reads_gradients and FusedStep.serves(plan.optimizer)
        self._fused_step = FusedStep(plan.optimizer) if fused else None
        self._binding = getattr(plan.optimizer, "binding", None)
        self._world_size = plan.backend.collectives.world_size
        self.overwrites = plan.compiled is not None and plan.compiled.overwrites
        self.failure: TrainingError | None = None
        self._clip_by = None if plan.options["clip"] is None else ClippingBy(plan.options["clip"])
        wanted = clip is not None or self._clip_by is not None or bool(plan.listeners.gradient_norm)
        self._reads_gradients = wanted
        self._turn = Turn([slot.parameter for slot in plan.gradients.slots])
        self._norm: Tensor | None = None
        self._overflow: Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are gradients of a window."""
        return self._turn.is_open

    def take_turn(self) -> None:
        """See that the gradients on the parameters are this window's, and not another trainer's."""
        self._turn.take()

    def open(self) -> None:
        """Clear what others left behind before a window, such as another trainer of a module that both train."""
        self._turn.take()
        if not self._turn.is_open:
            self._gradients.clear()
            self._turn.is_open = True

    def forward_backward(self, batch: Any) -> tuple[Tensor, Any]:
        """The loss of one micro-batch and what came beside it; its gradients are added to the window's."""
        try:
            with self._region:
                loss = self._loss(self._forward, batch)
            aux = None
            if not isinstance(loss, Tensor):
                loss, aux = split_loss(loss)
            weight = None if self._weight is None else self._weight(batch)
            self._add(loss, weight, outlast=not self._window.is_last)
        except BaseException as error:
            self.drop(error)
            raise
        return loss, None if aux is None else detached(aux)

    def launch(self, captured: CapturedStep, batch: Any) -> tuple[Tensor, Any, bool]:
        """As `forward_backward`, `count` and `update`, as one graph: the loss, what came beside it, whether it closed
        the window.
        """
        first, last = self._window.micro == 0, self._window.is_last
        self.open()  # not in a graph, which serves the later micro-batches of a window, too
        try:
            loss, aux = captured(batch, self.forward_backward, self.work, first=first, last=last)
        except BaseException as error:
            if self.is_open:  # else it was dropped where it was raised
                self.drop(error)
            raise
        full = self.count()
        if full:
            self.begin()
        return loss, aux, full

    def backward(self, loss: Tensor, weight: float | Tensor | None, *, retain_graph: bool) -> None:
        """Add the gradients of a loss, which have to outlast the next forward pass."""
        try:
            self._add(loss, weight, outlast=True, retain_graph=retain_graph)
        except BaseException as error:
            self.drop(error)
            raise

    def _add(self, loss: Tensor, weight: float | Tensor | None, *, outlast: bool, retain_graph: bool = False) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise no_loss(loss)
        self._strategy.before_backward()
        share = self._window.share(weight, self._strategy)
        scaled = self._scaler.scale(loss)
        self.open()
        # What backward starts from. Multiplying the loss instead costs an operator here, and one in backward.
        start: Tensor | None
        if isinstance(share, Tensor):
            start = share.to(scaled.dtype).expand_as(scaled)
        else:
            start = None if share is None else torch.full_like(scaled, share)
        with self._arithmetic:
            backward(self._gradients, scaled, start, retain_graph=retain_graph)
        self._strategy.exchange(last=self._window.is_last)
        if self.overwrites and outlast:
            self._gradients.load_state(self._gradients.state())

    def count(self) -> bool:
        """One micro-batch more; whether the window is full."""
        self._window.micro += 1
        if self._window.micro >= self._window.accumulate:
            return True
        self._strategy.micro(self._window.is_last)
        return False

    def update(self, *, full: bool) -> None:
        """Update the parameters with the gradients of a window, a full one or a short one; the next one begins."""
        self._turn.take()
        try:
            self.work(full=full)
            self._strategy.sync_buffers()
            self.begin()
        except BaseException as error:
            self.drop(error)
            raise

    def work(self, *, full: bool = True) -> None:
        """What the device does in an update; captured steps record it."""
        gradients, scaler = self._gradients, self._scaler
        if getattr(self._optimizer, "binding", None) is not self._binding:
            raise TrainingError(
                "another trainer has bound this optimizer since",
                why="an optimizer has one state, of what one trainer trains",
                remedy="give each trainer an optimizer of its own",
            )
        gradients.collect()
        self._strategy.reduce(gradients, exchanged=full)
        if True not in gradients.received:
            raise TrainingError(
                "no parameter received a gradient in this window",
                why="there was no backward pass since the last update, or it reached no parameter of the optimizer",
                remedy="call trainer.backward(loss) before trainer.update(), or look for frozen parameters",
            )
        gradients.grads_to_masters()
        correction = self._window.correction(self._strategy, full=full)
        # Only for those who read them: for some it means to look at each.
        read = self._reads_gradients or scaler.reads_gradients or correction is not None
        buffers = gradients.buffers() if read else []
        if correction is not None:
            torch._foreach_mul_(buffers, correction)
        if self._exposes:
            gradients.expose()
        self._norm = None
        if self._reads_gradients:
            scaler.unscale_(self._optimizer, buffers, self._strategy.agree)
            if self._clip is not None:
                self._norm = self._clip(buffers, self._strategy.norm)
            elif self._listeners.gradient_norm:
                self._norm = self._strategy.norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(buffers))))
            if self._clip_by is not None:
                self._clip_by(gradients)
        step = self._fused_step or partial(scaler.step, self._optimizer, buffers, self._strategy.agree)
        try:
            with self._arithmetic:  # some optimizers multiply matrices
                self._strategy.update(gradients, step)
        except BaseException as error:
            self.failure = half_updated(error)
            raise
        finally:  # a hook may raise when the masters have been updated
            gradients.masters_to_params()
        self._overflow = scaler.overflowed if self._listeners.overflow else None
        scaler.update(self._find_bad)
        gradients.clear()
        self._window.forget_weights()

    def tell(self, steps: int) -> None:
        """Tell who wants to know what became of the window, the `steps`-th."""
        for listener in self._listeners.gradient_norm:
            listener(self._norm)
        if self._overflow is not None:
            for listener in self._listeners.overflow:
                listener(self._overflow)
        for listener in self._listeners.step:
            listener(steps)

    def begin(self, *, opened: bool = False) -> None:
        """A window begins, or one that was `opened` before goes on."""
        self._turn.is_open = opened
        if not opened:
            self._window.reset()
        self._strategy.micro(self._window.is_last)

    def check(self) -> None:
        """Raise TrainingError where no step can be made any more."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def drop(self, error: BaseException) -> None:
        """Drop the window, because something in it failed: what there is of its gradients cannot be trusted."""
        if self._world_size > 1 and self.failure is None:  # what this rank raises, the others need not raise
            self.failure = parted(error)
        self.discard()

    def discard(self) -> None:
        """Drop the window: its gradients, and all that is known of it."""
        if self._window.accumulate > 1:
            logger.warning(
                "a step failed, and its window is dropped: it had %d of %d micro-batches",
                min(self._window.micro, self._window.accumulate),
                self._window.accumulate,
            )
        self._strategy.abandon()
        self._turn.take()
        self._gradients.clear()
        self._scaler.abandon()
        self.begin()
