"""The trainer: the object that `accel.trainer(...)` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelcore.devices import Roles
from accelcore.errors import ConfigurationError, Hinted, Once
from accelcore.precision.policy import create_scaler, fp32_mode, preset_name
from accelcore.precision.role import fastest_dtype
from accelcore.roles.compiler import Compiled
from accelcore.scaling.contract import LossScaler
from accelcore.training.data.data_stream import DataStream
from accelcore.training.data.evaluation import Evaluation, evaluate
from accelcore.training.data.sharding import Batches, check_loader
from accelcore.training.loss import check_loss, without_backward
from accelcore.training.observers import observed
from accelcore.training.options import HINTS, TrainerOptions, check_arguments, check_set, check_values, complete, unwrap
from accelcore.training.plan import Plan
from accelcore.training.saving.model_parts import warn_if_others_trained
from accelcore.training.saving.resumable import Resumable
from accelcore.training.saving.trainer_state import TrainerState, Trainings
from accelcore.training.schedule import Schedule
from accelcore.training.stages import Preparation
from accelcore.training.step import Step
from accelcore.training.trial import with_trial
from accelcore.training.window import Window

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack

_numbers = count()
_MISSING: Any = None  # a default, so that `check_arguments` names what is wrong


class Trainer(Resumable, Hinted):
    """Train one model with one optimizer. Made by `accel.trainer(...)`.

    The whole loop:

    >>> for epoch in trainer.epochs(2):
    ...     for batch in trainer.batches(loader):
    ...         value = trainer(batch)

    `trainer(batch)` is short for these calls, which a loop of your own can make:

    >>> with trainer.autocast():
    ...     value = trainer.forward(batch).square().mean()
    >>> trainer.backward(value)
    >>> trainer.update()  # True: this closed a window
    True

    A *window* is the `accumulate` micro-batches between two updates. If a step raises, its window is dropped, and the
    next window starts clean. In a job of several ranks every later step raises, because the ranks may have diverged.

    Args:
        backend: where to train.
        model: the bare module; it is moved to the device. The trainer wraps it and leaves the module itself as it is.
            A result of `torch.compile` means `compile=True`, and DistributedDataParallel `parallel="ddp"`: the
            trainer takes the module in it.
        optimizer: an optimizer over parameters of `model`.
        options: see `TrainerOptions`.

    Attributes:
        backend: as given.
        state: the state of this trainer; `Together` uses it.
        aux: what the last `loss` returned beside the scalar.
        extra: the dict last given to `save(extra=...)`, or read by `resume`. Each checkpoint holds it.

    Raises:
        ConfigurationError: arguments contradict each other. Model and optimizer are unchanged.
        UnsupportedError: the backend does not declare what is asked for. Model and optimizer are unchanged.
    """

    _hints = HINTS

    def __init__(
        self, backend: Roles, model: nn.Module, optimizer: Optimizer = _MISSING, **options: Unpack[TrainerOptions]
    ) -> None:
        super().__init__()
        check_arguments(backend, model, optimizer)
        given = complete(with_trial(options))
        given["precision"] = preset_name(
            given["precision"], lambda: fastest_dtype(backend.precision, backend.capabilities.autocast_dtypes)
        )
        given["fp32"] = fp32_mode(given["fp32"], backend.capabilities.fast_fp32)
        log = Once(backend.collectives.rank)
        model = unwrap(model, given, log)
        check_loss(given["loss"], model)
        self._name = type(model).__name__  # "fsdp" gives the model a class of torch's
        check_values(given)
        self.backend = backend
        self._schedule = Schedule(given["scheduler"], optimizer, given["schedule_by"], given["warmup"], log)
        self._plan = plan = Plan(backend, model, optimizer, given, log)
        self._preparation = Preparation(plan)
        self._preparation.check("accel.trainer(...)", plan.decide)
        self._preparation.apply()
        self._scaler = create_scaler(backend.scaler, plan.policy)
        self._window = Window(given["accumulate"], backend, divisor=plan.strategy.divisor, tensors_only=given["graph"])
        self._stream = DataStream(backend.runtime, backend.collectives, log)
        self.state = TrainerState(
            plan, scaler=self.scaler, schedule=self._schedule, stream=self._stream, window=self._window
        )
        self._number = next(_numbers)
        self.aux: Any = None
        self._lacks_autocast = plan.policy.autocast is not None  # until a step of the script's own enters it
        self._make_step()
        self._schedule.begin(given["total_steps"])
        for listener in plan.listeners.begin:
            listener(proxy(self))

    def __setattr__(self, name: str, value: object) -> None:
        check_set(name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        optimizer = getattr(self.optimizer, "name", type(self.optimizer).__name__)
        return f"<Trainer of {self._name} by {optimizer} on {self.backend.device}, {self.steps} steps>"

    @property
    def model(self) -> nn.Module:
        """Model, as given."""
        return self._plan.model

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer, as given."""
        return self._plan.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """Learning rate scheduler; None if there is none, or if it is not made yet."""
        return self._schedule.scheduler

    @property
    def scaler(self) -> LossScaler:
        """Loss scaler; one that does nothing if none is needed."""
        return self._scaler

    @property
    def steps(self) -> int:
        """Number of windows closed so far."""
        return self._window.steps

    @property
    def window_closed(self) -> bool:
        """Whether no window is open. The last micro-batch, if there was one, has closed it. See `accumulate`."""
        return not self._step.is_open

    @property
    def total_steps(self) -> int | None:
        """Number of windows of the whole training, as given, or from `epochs(n)` and the last loader; or None."""
        return self._plan.options["total_steps"] or self._stream.loops.total_steps(self.accumulate)

    @property
    def options(self) -> Mapping[str, Any]:
        """Options that this trainer was made with, defaults included; see `TrainerOptions`."""
        return MappingProxyType(self._plan.options)

    @property
    def accumulate(self) -> int:
        """Number of micro-batches of a window, as given."""
        return self._window.accumulate

    @property
    def skipped(self) -> int:
        """Number of windows whose update was skipped because a gradient overflowed. Reading it waits for the device."""
        return self.scaler.skipped

    @property
    def compiled(self) -> Compiled | None:
        """Result of `compile`; None if it was not asked for."""
        return self._plan.compiled

    @property
    def epoch(self) -> int:
        """Epoch of `batches` that is running or comes next, counted from 0. Setting it chooses the next epoch."""
        return self._stream.position.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._stream.move_to(epoch)

    def epochs(self, total: int) -> Iterator[int]:
        """Return the epochs that remain of `total`, counted from 0. If none remains, the log reports it.

        After a `resume`, a loop over `range(total)` trains `total` epochs more. A loop over `epochs` inside another one
        is a TrainingError: a trainer counts its epochs once.
        """
        return self._until_end(self._stream.epochs(total))

    def _until_end(self, epochs: Iterator[int]) -> Iterator[int]:
        yield from epochs
        if self._window.micro:
            self._plan.log.warn(
                "trainer.epochs(...) ended within a window, after %d of %d micro-batches: trainer.flush() closes it",
                *(self._window.micro, self.accumulate),
            )

    def batches(self, loader: Iterable[Any], *, shard: bool = True) -> Batches:
        """Return the batches of one epoch: on the device, this rank's share. Their `len()` is their number.

        At the end a short window is flushed. After a `resume` in mid-epoch the first call yields the rest of that
        epoch. An epoch that is left early, by `break` or an exception, has ended: to resume within an epoch, save
        inside the loop, after training on a batch.

        Args:
            loader: a DataLoader, or any iterable of batches. In a job of several ranks a DataLoader with a plain
                sampler gets a `DistributedSampler`. Of an iterable, each rank gets every `world_size`-th batch, and all
                ranks must read it in the same order; of a `ShardedStream`, each rank gets its rows. All ranks get the
                same number of batches: with `drop_last=True` surplus rows are dropped, else some rows come twice.
            shard: False if the loader already yields this rank's share.
        """
        read = self._read(loader, shard=shard)
        if self._plan.listeners.reads_data:
            read = observed(read, self._plan.listeners, lambda: self._stream.position.epoch)
        return Batches(read, lambda: self._stream.length(loader, shard=shard))

    def _read(self, loader: Iterable[Any], *, shard: bool) -> Iterator[Any]:
        """Yield the batches of an epoch; make the schedule before, and flush the last window after."""
        check_loader(loader)
        self._step.check_model()
        self._plan.gradients.refresh(thorough=True)
        self._stream.measure(loader, shard=shard)
        self._schedule.check_updates(self.total_steps)
        loops = self._stream.loops
        self._schedule.warn_of_length(loops.total, self.total_steps, loops.total_steps(self.accumulate))
        began = None if self._step.is_open else self.steps
        self._step.calls.epoch_begins()
        yield from self._stream.batches(loader, shard=shard)
        self.flush()
        if self._stream.use.given is not None:  # the rest of an epoch after a resume may be empty
            self._step.calls.warn_if_idle()
        self._step.end_epoch(began)

    def evaluate(self, loader: Iterable[Any]) -> Evaluation:
        """Return the batches of `loader` to evaluate on: on the device, every row once over all ranks.

        `trainer.evaluate(loader).mean(function)` is the mean of `function(batch)` over all rows of all ranks. A loop:

        >>> outputs = job.gather([model(batch) for batch in trainer.evaluate(loader)])

        In the loop, and only there, the model is in evaluation mode, under `no_grad` and autocast. Ranks may differ in
        the number of rows: in a loop of your own, combine results by `job.gather`, or add up sums. If the loader does
        not shuffle, gathered results are in the order of its rows.

        Args:
            loader: every rank must call this. A DataLoader is divided by rows, whatever its sampler, into the same
                number of batches for each rank. Anything else is divided by batches: some ranks may have one more, and
                all must read it in the same order. If the model is sharded, a rank with more batches than others is an
                error.
        """
        self._step.check_failure()
        plan = self._plan
        return evaluate(self.backend, self.model, plan.contexts.make_region, loader, together=plan.strategy.is_sharded)

    def __call__(self, batch: Any, *more: Never) -> Tensor:
        """Train on one micro-batch and return its loss, detached and unscaled. Does not wait for the device.

        Tensors of the batch that are elsewhere are moved to the device first. Several are one batch as a tuple:
        `trainer((inputs, targets))`.
        """
        if more:
            raise ConfigurationError("trainer(batch) takes one batch", remedy="write trainer((inputs, targets))")
        self._check_step(begins=self._window.micro == 0)
        captured, step = self._plan.captured, self._step
        step.calls.note_update("trainer(batch)")
        loss, self.aux = step.forward_backward(batch) if captured is None else step.run_captured(captured, batch)
        step.end_micro_batch(loss, updated=captured is not None)
        return without_backward(loss)

    @property
    def forward(self) -> Callable[..., Any]:
        """Model to call in a loop of your own, compiled and replicated as asked."""
        self._step.check_failure()
        if self._window.micro == 0 or self._window.is_last:
            self._step.check_unchanged()
        if self._lacks_autocast and torch.is_autocast_enabled(self.backend.device.type):
            self._lacks_autocast = False
        return self._plan.forward

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass and the loss."""
        self._lacks_autocast = False
        return self._plan.contexts.make_region()

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, the mean over one micro-batch.

        Args:
            loss: a scalar.
            weight: number of examples of the mean; None if every micro-batch counts alike. With a weight, first add
                up the losses of a micro-batch.
            retain_graph: whether another loss of the same forward pass follows.

        Raises:
            TrainingError: `loss` is not a scalar of the parameters, or in a job not computed by `trainer.forward`; or
                `loss.backward()` was called within the window, which would add gradients that are not the trainer's;
                or, with `accumulate` above 1, `update` was not called after the last batch.
        """
        self._check_step(begins=not self._step.is_open)  # the forward pass may have bypassed `forward`
        if self._lacks_autocast:
            self._lacks_autocast = False
            self._plan.log.warn(
                "the first step has not entered trainer.autocast(): if it entered no other autocast, its forward pass "
                "ran in the dtype of the model. Write: with trainer.autocast(): loss = "
                "criterion(trainer.forward(inputs), targets)"
            )
        self._step.backward(loss, weight, retain_graph=retain_graph, place=self._stream.place)

    def update(self) -> bool:
        """Count a micro-batch, after each batch; update at the end of a window. Return whether a window was closed."""
        self._step.check_failure()
        self._step.check_update()
        self._step.calls.note_update("trainer.update()")
        if self._window.is_last:
            self._step.check_unchanged()
            self._number_step(self._window.micro + 1)
        return self._step.end_micro_batch()

    def flush(self) -> None:
        """Close a window that is not full, as the mean of its micro-batches. Does nothing if no window is open."""
        if self._window.micro:
            self._step.check_can_train()
            self._step.check_unchanged()
            self._number_step(self.accumulate)
            self._step.close_window(full=False)

    def refresh(self) -> None:
        """Prepare the model and the optimizer again, after parameters were frozen, unfrozen or added.

        Call it between two windows, in a job on all ranks. A parameter that was added must be in a group of the
        optimizer (`optimizer.add_param_group`), or frozen.

        Raises:
            TrainingError: a window is open, or the trainer cannot follow the change. In a job of several ranks the
                trainer can then no longer train, on any rank.
            DistributedError: the ranks of the job have made different changes. The trainer can no longer train.
        """
        self._step.check_can_train()
        self._preparation.repeat(self._step.check_refreshable, self._step.give_up)
        self._make_step()

    def load(self, path: str | Path, *, optimizer: bool | None = None) -> dict[str, Any]:
        """Load the model from a checkpoint, to begin a new run with it, or from another program's file.

        Schedule, steps, position in the data, loss scale and random numbers stay as they are. All ranks must call it.

        Args:
            path: a checkpoint of `save`, or a folder of which the newest is taken. Or a file of `torch.save` (`.pth`,
                `.pt`, Lightning's `.ckpt`; read without running code) or of safetensors, or a folder of accelerate's.
            optimizer: whether to load the optimizer's state: moments, and numbers of updates. With True, its options in
                the script, such as the learning rate, stay. None: of a checkpoint, load only the model; of another
                program's file, also load the optimizer's state and options.

        Returns:
            The checkpoint's `extra`; or the rest of another program's file, to use as you like, as in
            `trainer.epoch = rest["epoch"] + 1` and `trainer.scheduler.load_state_dict(rest["scheduler"])`.

        Raises:
            CheckpointError: the file cannot be read or does not fit. The trainer is unchanged.
        """
        return self.state.load(path, optimizer)

    def _trainings(self, extra: dict[str, Any] | None) -> Trainings:
        return {"": self.state.parts(self.extra if extra is None else extra, writes=extra is not None)}

    def _make_step(self) -> None:
        self._step = self.state.step = Step(self._plan, self._scaler, self._window, self._schedule)
        self._step.begin()

    def _check_step(self, *, begins: bool) -> None:
        """Check that the trainer can train on a micro-batch, which `begins` a window or not."""
        self._step.check_can_train()
        if begins or self._window.is_last:
            self._step.check_unchanged(trains=True)
        self._number_step(self._window.micro + 1)
        if self._plan.otherwise_trained is not None:
            warn_if_others_trained(self._plan)
        if begins and not self._window.steps:
            if self.backend.collectives.world_size > 1:
                self._stream.use.warn_if_unused()
            if self._schedule.is_to_be_made:
                self._schedule.check_updates(None)  # raises

    def _number_step(self, micro: int) -> None:
        """Tell the job which step and micro-batch this is; a flush counts as the last one."""
        self.backend.collectives.steps[self._number] = (self._window.steps + 1, micro)
