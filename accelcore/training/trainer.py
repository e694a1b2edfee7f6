"""The trainer: the user's object. What it does is done by the plan it makes and the step it composes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.backend import Backend
from accelcore.errors import TrainingError
from accelcore.roles.compiler import Compiled
from accelcore.training.checkpointing import Checkpointing
from accelcore.training.clipping import Clipping
from accelcore.training.data_stream import DataStreams
from accelcore.training.evaluation import Evaluation
from accelcore.training.mistakes import check_arguments
from accelcore.training.model_changes import ModelSnapshot
from accelcore.training.options import TrainerOptions, check_values, complete
from accelcore.training.parts.every import every_part
from accelcore.training.plan import Plan
from accelcore.training.policy import create_scaler, fp32_mode, preset_name
from accelcore.training.reading import Reading
from accelcore.training.schedule import Schedule
from accelcore.training.stages.order import Preparation
from accelcore.training.state import TrainingState
from accelcore.training.step import Step
from accelcore.training.unable import half_restored, other_job
from accelcore.training.window import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Trainer"]

_numbers = count()


class Trainer(Reading, Checkpointing):
    """Trains one model with one optimizer. Made by `accel.trainer(...)`.

    The whole loop::

        for epoch in trainer.epochs(10):
            for batch in trainer.batches(loader):
                loss = trainer(batch)

    `trainer(batch)` is short for the three calls that a loop of one's own makes::

        with trainer.autocast():
            loss = criterion(trainer.forward(inputs), targets)
        trainer.backward(loss)
        trainer.update()

    A *window* is the `accumulate` micro-batches between two updates. Where something in a step raises, its window is
    dropped, and the next one is right; in a job of several ranks, which may have parted, every later step raises.

    Args:
        backend: where to train.
        model: a bare module; it is moved to the device. The trainer wraps it, the module itself stays as it is.
        optimizer: over parameters of `model`.
        options: see `TrainerOptions`.

    Attributes:
        model, optimizer, scheduler: as given.
        scaler: the loss scaler; one that does nothing where none is needed.
        aux: what the last `loss` returned beside the scalar.
        steps: windows closed so far.
        extra: what `save(extra=...)` or `resume` was last given, empty at first; each checkpoint holds it.

    Raises:
        ConfigurationError: arguments that contradict each other. Model and optimizer are then as they were.
        UnsupportedError: the backend does not declare what is asked for; likewise.
    """

    def __init__(
        self, backend: Backend, model: nn.Module, optimizer: Optimizer, **options: Unpack[TrainerOptions]
    ) -> None:
        given = complete(options)
        given["precision"] = preset_name(given["precision"], backend)
        given["fp32"] = fp32_mode(given["fp32"], backend)
        check_arguments(model, optimizer, given["loss"])
        check_values(given)
        self._backend, self._options = backend, given
        self._schedule = Schedule(given["scheduler"], optimizer, given["schedule_by"])
        self._plan = Plan(backend, model, optimizer, given)
        self._preparation = Preparation(self._plan)
        self.model, self.optimizer, self.scheduler = model, optimizer, given["scheduler"]
        self.scaler = create_scaler(backend.scaler, self._plan.policy)
        norm, flagged = given["clip_norm"], backend.capabilities.overflow_flag
        self._clip = None if norm is None else Clipping(norm, flagged=flagged)
        self._window = Window(
            given["accumulate"], backend.device, divisor=self._plan.strategy.divisor, tensors_only=given["graph"]
        )
        by_epoch = given["schedule_by"] == "epoch"
        self._streams = DataStreams(backend.runtime, backend.collectives, counts_epochs=by_epoch)
        self._evaluation = Evaluation(backend, model, self._plan.contexts.make_region)
        self._world_size = backend.collectives.world_size
        self._run, self._number = uuid4().hex, next(_numbers)
        self.aux: Any = None
        self.extra, self.steps = {}, 0
        self._compose()
        self._step.begin()

    def __repr__(self) -> str:
        optimizer = getattr(self.optimizer, "name", type(self.optimizer).__name__)
        return f"<Trainer of {type(self.model).__name__} by {optimizer} on {self._backend.device}, {self.steps} steps>"

    @property
    def forward(self) -> Callable[..., Any]:
        """The model to call in a loop of one's own: compiled and replicated as asked."""
        if self._window.micro == 0 or self._window.is_last:
            self._check_unchanged()
        return self._plan.forward

    @property
    def compiled(self) -> Compiled | None:
        """What became of `compile`; None where it was not asked for."""
        return self._plan.compiled

    @property
    def skipped(self) -> int:
        """Windows whose update was skipped because a gradient overflowed. Reading it waits for the device."""
        return self.scaler.skipped

    @property
    def accumulate(self) -> int:
        """Micro-batches an update, as given."""
        return self._window.accumulate

    def __call__(self, batch: Any) -> Tensor:
        """Train on one micro-batch; the loss, detached and unscaled. Does not wait for the device."""
        if self._window.micro == 0:
            self._check_able()
            self._begin()
            self._streams.check_first_batch()
        elif self._window.is_last:
            self._begin()
        if self._plan.captured is None:
            loss, self.aux = self._step.forward_backward(batch)
            loss = loss.detach()
            if self._step.overwrites:
                loss = loss.clone()
            self._count()
        else:
            loss, self.aux, full = self._step.launch(self._plan.captured, batch)
            if full:
                self._end_window()
        for listener in self._plan.listeners.loss:
            listener(loss)
        return loss

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return self._plan.contexts.make_region()

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, one micro-batch's mean.

        Args:
            loss: a scalar.
            weight: over how many examples it is a mean; None where every micro-batch counts alike. Several losses of
                one micro-batch, before one `update`, are added up, and have the same weight.
            retain_graph: whether another loss of the same forward pass comes after this one.

        Raises:
            TrainingError: `loss` is not a scalar tensor that depends on the parameters, or the model that made it is
                not `trainer.forward` in a job of several ranks.
        """
        self._check_able()
        if not self._step.is_open:  # the forward pass may have gone around `forward`
            self._begin()
            self._streams.check_first_batch()
        elif self._window.is_last:
            self._begin()
        if weight is None and self._options["weight"] is not None:
            raise TrainingError(
                "this trainer weighs micro-batches, and backward was given no weight",
                remedy="call trainer.backward(loss, weight=...), or leave weight= out of accel.trainer(...)",
            )
        self._step.backward(loss, weight, retain_graph=retain_graph)
        for listener in self._plan.listeners.loss:
            listener(loss.detach())

    def update(self) -> bool:
        """Count a micro-batch; at the end of a window, update the parameters. True when a window was closed."""
        self._step.check()
        if self._window.is_last:
            self._begin()
        return self._count()

    def flush(self) -> None:
        """Close a window that is not full, as the mean of the micro-batches it has; nothing where there is none."""
        if self._window.micro:
            self._check_able()
            self._begin()
            self._step.update(full=False)
            self._end_window()

    def refresh(self) -> None:
        """Prepare the model and the optimizer again, after parameters were frozen, unfrozen or added.

        Call it between two windows, in a job on all ranks. A parameter that was added must be in a group of the
        optimizer (`optimizer.add_param_group`), or frozen.

        Raises:
            TrainingError: a window is open, or the trainer cannot follow the change.
            DistributedError: the ranks of the job have made different changes.
        """
        self._check_able()
        if self._within:
            raise TrainingError(
                f"refresh was called within a window, after {self._window.micro} of {self.accumulate} micro-batches",
                why="the gradients of the window belong to the parameters that it began with",
                remedy="change the model between two windows; trainer.flush() closes one, before the change",
            )
        self._preparation.repeat(self._snapshot.check_refreshable)
        self._compose()
        self._step.begin()

    def _state(self, *, saves: bool = False) -> TrainingState:
        self._check_able()
        self._snapshot.check_model()
        self._streams.warn_if_unused(self.steps)
        self._schedule.epochs_ended(self._streams["train"].epoch)
        if saves:
            self._schedule.check()
        return TrainingState(
            backend=self._backend,
            parts=every_part(
                self.model,
                self.optimizer,
                scaler=self.scaler,
                scheduler=self.scheduler,
                schedule_by=self._options["schedule_by"],
                gradients=self._plan.gradients,
                window=self._window,
                streams=self._streams,
                runtime=self._backend.runtime,
                extra=self.extra,
                strategy=self._plan.strategy,
            ),
            steps=self.steps,
            take_turn=self._step.take_turn,
            restored=self._restored,
            give_up=self._give_up,
            sharded=self._plan.strategy.sharded(self.model),
        )

    def _restored(self) -> None:
        if self._plan.captured is not None:
            self._plan.captured.forget()
        self._schedule.restored(self._streams["train"].epoch)
        self._step.begin(opened=self._window.micro > 0)

    def _give_up(self, error: BaseException) -> None:
        self._step.failure = half_restored(error)

    def _compose(self) -> None:
        self._snapshot = ModelSnapshot(self.model, self.optimizer, self._plan.strategy.rest)
        self._step = Step(self._plan, scaler=self.scaler, window=self._window, clip=self._clip)

    @property
    def _within(self) -> bool:
        return self._window.micro > 0 or self._step.is_open

    def _begin(self) -> None:
        """Begin a window, or its last micro-batch."""
        self._check_unchanged()
        self._backend.collectives.steps[self._number] = self.steps + 1

    def _check_model(self) -> None:
        self._snapshot.check_model()

    def _check_unchanged(self) -> None:
        try:
            self._snapshot.check()
        except TrainingError:
            if self._within:
                self._step.discard()
            raise

    def _count(self) -> bool:
        full = self._step.count()
        if full:
            self._step.update(full=True)
            self._end_window()
        return full

    def _end_window(self) -> None:
        self.steps += 1
        self._schedule.window_ended()
        self._step.tell(self.steps)

    def _check_able(self) -> None:
        self._step.check()
        world_size = self._backend.collectives.world_size
        if world_size != self._world_size:
            raise other_job(self._world_size, world_size)
