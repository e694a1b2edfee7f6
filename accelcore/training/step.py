"""One training step: forward and backward pass of each micro-batch, and the update at the end of a window."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import DistributedError, TrainingError, logger
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.torch_routes import FusedStep
from accelcore.scaling.contract import MARK, LossScaler
from accelcore.training.agreement import check_replicas
from accelcore.training.captured import CapturedStep
from accelcore.training.gradients import Clipping, backward, clip_by
from accelcore.training.loss import LossOfModel, split_loss, unusable_loss
from accelcore.training.nonfinite import FiniteCheck, first_not_finite
from accelcore.training.observers import tell
from accelcore.training.parallel.strategy import broadcast_tensors
from accelcore.training.plan import Plan
from accelcore.training.schedule import Schedule
from accelcore.training.script_checks import UNTREATED, ModelSnapshot, ScriptCalls, SharedParameters, no_update
from accelcore.training.window import Window
from accelcore.util.containers import detached, is_on

_WALKED = 64  # windows between two walks of the model; the first walks follow windows 1, 2, 4, 8, 16 and 32


class Step:
    """Train on micro-batches, and update the parameters at the end of a window.

    Everything that a step needs is bound here. A step walks neither the model nor the optimizer's groups; `check_model`
    does, after some of the windows, when an epoch begins and before a save. In one process the strategy does nothing;
    without a loss scale, the scaler only steps the optimizer.
    """

    def __init__(self, plan: Plan, scaler: LossScaler, window: Window, schedule: Schedule) -> None:
        self._forward, self._listeners = plan.forward, plan.listeners
        self._loss, self._weight = plan.options["loss"] or LossOfModel(plan.model), plan.options["weight"]
        self._region, self._arithmetic = plan.contexts.region, plan.contexts.arithmetic
        self._gradients, self._optimizer, self._strategy = plan.gradients, plan.optimizer, plan.strategy
        self._scaler, self._window, self._schedule = scaler, window, schedule
        norm, flagged = plan.options["clip_norm"], plan.backend.capabilities.overflow_flag
        self._clip = None if norm is None else Clipping(norm, flagged=flagged)
        self._clip_by = plan.options["clip"]
        self._model = plan.model
        self._find_bad = lambda: first_not_finite(plan.gradients, plan.gradients.of_values())
        self._sets_grad = not isinstance(plan.optimizer, RoutedOptimizer)  # torch's optimizers read `grad`
        # One with a method of its own may keep more there than `grad`, such as Opacus the gradients of each sample.
        self._zeroes_grad = type(plan.optimizer).zero_grad is not Optimizer.zero_grad
        # `FusedStep` cannot skip an overflow. A graph needs torch's own step, which checks what the graph bakes in.
        self._is_captured = plan.captured is not None
        fused = not self._is_captured and not scaler.reads_gradients and FusedStep.serves(plan.optimizer)
        self._stepped: Any = FusedStep(plan.optimizer) if fused else plan.optimizer
        self._device, self._to_device = plan.backend.device, plan.backend.runtime.to_device
        self._job, self._world_size = plan.backend.collectives, plan.backend.collectives.world_size
        self._log = plan.log
        self._reads_norm = norm is None and plan.listeners.measures_norm
        self._unscales = norm is not None or self._clip_by is not None or self._reads_norm
        self._reads = self._unscales or scaler.reads_gradients
        self.shared = SharedParameters(plan.gradients.slots, plan.strategy.leaves, plan.log)
        if self._is_captured:  # its parameters keep gradients between windows
            self.shared.watch()
        self.calls = ScriptCalls(plan.optimizer, self._job, window.accumulate, plan.log)
        self._norm: Tensor | None = None
        self._overflow: Tensor | None = None
        # The next call of a compiled model may overwrite the outputs and gradients of its last call.
        self._overwrites = plan.compiled is not None and plan.compiled.overwrites
        self._snapshot = ModelSnapshot(plan.model, plan.optimizer, plan.strategy.reset, plan.log)
        self.check_replicas = partial(check_replicas, plan)
        self.finite = FiniteCheck(plan, window.steps)
        self.failure: TrainingError | None = None  # why the trainer can no longer train

    @property
    def is_open(self) -> bool:
        """Whether a window has begun, with gradients or without."""
        return self.shared.is_open

    def _open(self) -> None:
        """Open a window if none is open: clear gradients that others, such as another trainer, have left."""
        self.shared.acquire()
        if not self.shared.is_open:
            if self.shared.open():
                self._gradients.clear()
        else:
            self.shared.check_foreign()
            self.shared.check_left(counted=self._window.micro > 0)

    def forward_backward(self, batch: Any) -> tuple[Tensor, Any]:
        """Add the gradients of one micro-batch to the window's; return its loss and auxiliary outputs, detached."""
        try:
            if not is_on(batch, self._device):
                batch = self._to_device(batch)
            with self._region:
                loss = self._loss(self._forward, batch)
            aux = None
            if not isinstance(loss, Tensor):
                loss, aux = split_loss(loss)
            weight = None if self._weight is None else self._weight(batch)
            self._add_gradients(loss, weight, outlast=not self._window.is_last)
        except BaseException as error:
            self._window.annotate(error, batch, self._model)
            self.drop(error)
            raise
        loss = loss.detach().clone() if self._overwrites else loss.detach()
        return loss, None if aux is None else detached(aux)

    def run_captured(self, captured: CapturedStep, batch: Any) -> tuple[Tensor, Any]:
        """Do what `forward_backward` does as one graph, which also updates the parameters at the end of a window."""
        first, last = self._window.micro == 0, self._window.is_last
        self._open()  # not in the graph, which later micro-batches of a window replay
        try:
            if not is_on(batch, self._device):
                batch = self._to_device(batch)
            return captured(batch, self.forward_backward, self.update_parameters, first=first, last=last)
        except BaseException as error:
            if self.is_open:  # else `forward_backward` has dropped the window
                self.drop(error)
            raise

    def backward(self, loss: Tensor, weight: float | Tensor | None, *, retain_graph: bool, place: object) -> None:
        """Add the gradients of a loss, and call its observers. The gradients outlast the next forward pass.

        `place`: the batch's place in the data.
        """
        try:
            self.calls.note_backward(place)
            self._add_gradients(loss, weight, outlast=True, retain_graph=retain_graph)
        except BaseException as error:
            self.drop(error)
            raise
        loss = loss.detach()
        self.finite.losses.append((self._window.steps + 1, loss))
        tell(self._listeners.loss, loss)

    def _add_gradients(
        self, loss: Tensor, weight: float | Tensor | None, *, outlast: bool, retain_graph: bool = False
    ) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or MARK in loss.__dict__:
            raise unusable_loss(loss)
        if weight is None and self._weight is not None:
            remedy = "let that function return a number, or call trainer.backward(loss, weight=...)"
            raise TrainingError("a loss has no weight, and this trainer was made with weight=", remedy=remedy)
        self._strategy.before_backward()
        share = self._window.share(weight)
        scaled = self._scaler.scale(loss)
        self._open()
        # The gradient that backward starts from. Multiplying the loss costs an operator here, and one in backward.
        start: Tensor | None
        if isinstance(share, Tensor):
            start = share.to(scaled.dtype).expand_as(scaled)
        else:
            start = None if share is None else torch.full_like(scaled, share)
        with self.shared.own_backward:
            with self._arithmetic:
                backward(self._gradients, scaled, start, retain_graph=retain_graph)
            self._strategy.after_backward()
        if self._overwrites and outlast:  # the next call of the model overwrites them, but not a copy
            self._gradients.load_state(self._gradients.state())
        if outlast and not self._is_captured:  # a graph holds its gradients itself
            self.shared.note_left()

    def end_micro_batch(self, loss: Tensor | None = None, *, updated: bool = False) -> bool:
        """Count a micro-batch; close the window after its last one, and return whether it did. Observers get `loss`."""
        if loss is not None:
            self.finite.losses.append((self._window.steps + 1, loss))
        self._window.micro += 1
        if self._window.micro < self._window.accumulate:
            self._strategy.before_forward(self._window.is_last)
            tell(self._listeners.loss, loss)
            return False
        self.close_window(full=True, updated=updated, loss=loss)
        return True

    def close_window(self, *, full: bool, updated: bool = False, loss: Tensor | None = None) -> None:
        """Update the parameters unless a graph has `updated` them; begin a window; step schedule; call observers."""
        self.shared.acquire()
        try:
            self.shared.check_foreign()
            if loss is None and not self._window.steps:  # once, because it may wait for the device
                self.shared.warn_if_zero()
            if not updated:
                self.update_parameters(full=full)
            if self._is_captured:
                self._scaler.warn()
            if self._world_size > 1:
                broadcast_tensors(self._job, list(self._model.buffers()))
            self.begin()
        except BaseException as error:
            self.drop(error)
            raise
        self._window.steps += 1
        lr = self._optimizer.param_groups[0].get("lr") if self._listeners.learning_rate else None
        lr = lr.clone() if isinstance(lr, Tensor) else lr  # the schedule writes to it
        self._schedule.window_ended()
        if self._window.steps % _WALKED == 0 or self._window.steps.bit_count() == 1:  # the same windows on all ranks
            self._snapshot.check_model()  # before observers, which may call `Trainer.refresh`
            self.check_replicas()
        tell(self._listeners.loss, loss)
        tell(self._listeners.gradient_norm, self._norm)
        tell(self._listeners.overflow, self._overflow)
        tell(self._listeners.learning_rate, lr)
        tell(self._listeners.step, self._window.steps)
        if self._window.steps >= self.finite.due:
            self.finite.window_ended(self._window.steps)

    def update_parameters(self, *, full: bool = True) -> None:
        """Update the parameters: the work of the device at the end of a window, which a graph captures."""
        gradients = self._gradients
        self.calls.check_bound()
        gradients.collect()
        self._strategy.reduce(gradients, full=full)
        if True not in gradients.received:
            raise self._nothing_received()
        gradients.grads_to_masters()
        buffers = self._unscale_and_clip(full=full)
        try:
            self._step_optimizer(buffers)
        finally:  # a hook of the optimizer may raise after the masters were updated
            gradients.masters_to_params()
        self._overflow = self._scaler.overflowed if self._listeners.overflow else None
        self._scaler.update(self._find_bad, captured=self._is_captured)
        self._clear_gradients()
        if self._is_captured:  # else `begin` does
            self._window.forget_weights()

    def _clear_gradients(self) -> None:
        if self._zeroes_grad:
            self._optimizer.zero_grad()
        self._gradients.clear()

    def _nothing_received(self) -> TrainingError:
        self._snapshot.check_model()  # if all layers were replaced, this names one
        return TrainingError(
            "no parameter received a gradient in this window",
            remedy="look for frozen parameters, for zero_grad() after trainer.backward(loss), or for a loss of another "
            "model: loss(model, batch) must call the model that it gets; a loop of your own must call trainer.forward",
        )

    def _unscale_and_clip(self, *, full: bool) -> list[Tensor]:
        """Return the weighted gradients, unscaled if they are clipped or observed; none if they are not read."""
        gradients = self._gradients
        correction = self._window.correction(full=full)
        buffers = gradients.buffers() if self._reads or correction is not None else []
        if correction is not None:
            torch._foreach_mul_(buffers, correction)
        if self._sets_grad:
            gradients.expose()
        if self._unscales:
            self._scaler.unscale_(self._optimizer, buffers, self._strategy.agree)
            if self._clip is not None:
                self._norm = self._clip(buffers, self._strategy.norm)
            elif self._reads_norm:
                self._norm = self._strategy.norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(buffers))))
            if self._clip_by is not None:
                clip_by(self._clip_by, gradients)
        return buffers

    def _step_optimizer(self, buffers: list[Tensor]) -> None:
        """Update the trained tensors, unless a gradient overflowed.

        The loss scaler looks for inf and NaN here, or in `unscale_` before, and skips: by the optimizer's kernel if it
        takes `found_inf`, else by not calling the optimizer. `Strategy.agree` makes one rank's overflow every rank's.
        """
        self.calls.expect_step(True)
        try:
            with self._arithmetic, self._strategy.updating(self._gradients):  # some optimizers multiply matrices
                self._scaler.step(self._stepped, buffers, self._strategy.agree)
        except BaseException as error:
            self.give_up(
                "its optimizer raised within a step, and may have updated a part of the parameters",
                "make model, optimizer and trainer again, and resume from a checkpoint; in a job, on all ranks",
                error,
            )
            raise
        finally:
            self.calls.expect_step(False)

    def begin(self) -> None:
        """Begin a window without gradients."""
        self._window.reset()
        self.resume()

    def resume(self) -> None:
        """Continue in the window that a checkpoint has restored, which may be open."""
        self.shared.forget()
        self.calls.forget()
        if self._window.micro:
            self.shared.is_open = self.calls.added = True
            self.shared.watch()
        self._strategy.before_forward(self._window.is_last)

    def end_epoch(self, began: int | None) -> None:
        """Report gradients and batches that updated nothing, and check that the parameters are finite.

        `began`: the number of steps when the epoch began; None if a window was open then.
        """
        if self.is_open and self._window.steps == began:
            self.discard("an epoch has ended without trainer.update()")
            raise no_update("an epoch has ended")
        if self.is_open:
            self._log.warn(
                "an epoch has ended, and trainer.update() was not called after the last trainer.backward(...): call it "
                "instead of optimizer.step(), and once more after the last batch"
            )
        self.finite.check(self._window.steps)

    def check_saved(self) -> None:
        """Raise TrainingError if the trainer has made no step of what is saved, or if an open window is spoilt."""
        if self.is_open and self._window.steps == self._window.micro == 0:
            raise no_update("trainer.save() was called")
        self.shared.check_foreign()

    def check_update(self) -> None:
        """Raise TrainingError unless `trainer.update()` follows `trainer.backward(loss)`."""
        if not self.calls.added:
            error = TrainingError(
                "trainer.update() was called, and trainer.backward(loss) was not called since the last update",
                why=UNTREATED,
                remedy="remove it after trainer(batch), which updates the parameters by itself. Otherwise call "
                "trainer.backward(loss) instead of loss.backward(), and trainer.update() once after it",
            )
            self.drop(error)
            raise error

    def check_can_train(self) -> None:
        """Raise the failure of an earlier step, or DistributedError if the job has another number of ranks now."""
        self.check_failure()
        if self._job.world_size != self._world_size:
            raise DistributedError(
                f"this trainer was made in a job of {self._world_size} ranks, and it now has {self._job.world_size}",
                remedy="make the trainer, and use it, inside one `with accel.distributed():`",
            )

    def check_unchanged(self, *, trains: bool = False) -> None:
        """Raise TrainingError, and drop the window, if the known parameters or the optimizer's groups have changed."""
        try:
            self._snapshot.check_known(trains=trains)
        except TrainingError:
            if self.is_open:
                self.discard("the model or the optimizer has changed")
            raise

    def check_model(self) -> None:
        """Do what `check_can_train` does; raise TrainingError if model or optimizer have changed."""
        self.check_can_train()
        self._snapshot.check_model()

    def check_refreshable(self) -> None:
        """Raise TrainingError if a window is open, or if `Trainer.refresh` cannot follow the change."""
        if self.is_open:
            micro, accumulate = self._window.micro, self._window.accumulate
            raise TrainingError(
                f"refresh was called within a window, after {micro} of {accumulate} micro-batches",
                remedy="change the model between two windows; trainer.flush() closes one, before the change",
            )
        self._snapshot.check_refreshable()

    def check_failure(self) -> None:
        """Raise TrainingError if the trainer can no longer train."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def give_up(self, what: str, remedy: str, error: BaseException) -> None:
        """Let every later step raise, because of `error`."""
        if self.failure is None:
            why = f"{type(error).__name__}: {error}"
            self.failure = TrainingError(f"this trainer cannot go on: {what}", why=why, remedy=remedy)
            self.failure.__cause__ = error

    def drop(self, error: BaseException) -> None:
        """Drop the window because `error` was raised in it. In a job, no later step is possible."""
        if self._world_size > 1:  # the other ranks need not have failed
            self.give_up(
                "a step failed on this rank of a job, and the other ranks may have continued without it",
                "end the job and resume it from a checkpoint; accelcore run --max-restarts 3 does so",
                error,
            )
        self.discard("a step failed")

    def discard(self, why: str) -> None:
        """Drop the window and its gradients."""
        micro, accumulate = self._window.micro, self._window.accumulate
        if micro and accumulate > 1:
            logger.warning(
                "%s, and the window is dropped: it had %d of %d micro-batches", why, min(micro, accumulate), accumulate
            )
        self._strategy.reset()
        self.shared.acquire()
        self._clear_gradients()
        self._scaler.abandon()
        self.begin()
