"""The trainer: one training step, right and fast on any backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelcore.errors import ConfigurationError, DistributedError, UnsupportedError
from accelcore.training.batches import Feed
from accelcore.training.checks import check_arguments, check_declared, no_loss
from accelcore.training.clipping import Clipping
from accelcore.training.graph import GraphedStep
from accelcore.training.parallel import create_parallel
from accelcore.training.policy import Policy, choose_policy

if TYPE_CHECKING:
    from accelcore.backend import Backend
    from accelcore.roles.compiler import Compiled
    from accelcore.roles.scaler import LossScaler

__all__ = ["Trainer"]

Loss = Callable[[Any, Any], Any]


class Trainer:
    """Trains one model with one optimizer. Made by `accel.trainer(...)`.

    The whole loop::

        for batch in trainer.batches(loader):
            loss = trainer(batch)

    `trainer(batch)` is short for the three calls that a loop of one's own makes::

        with trainer.autocast():
            loss = criterion(trainer.forward(inputs), targets)
        trainer.backward(loss)
        trainer.update()

    A *window* is the `accumulate` micro-batches between two updates.

    Args:
        backend: where to train.
        model: a bare module; it is moved to the device. The trainer wraps it, the module itself stays as it is.
        optimizer: over parameters of `model`.
        loss: `loss(model, batch)` returns a scalar, or `(scalar, aux)`; `model` is the one to call, prepared for
            this device. None: the model itself returns that, called as `model(**batch)` for a mapping, `model(*batch)`
            for a list or tuple, else `model(batch)`.
        scheduler: stepped once a window, also when a window is skipped for overflow.
        precision: `"fp32"`, `"bf16"`, `"fp16"`, or a `Policy`.
        loss_scale: a number for a static scale, `"dynamic"`, None for the precision's own.
        fp32: exactness of fp32 matrix products during steps: `"ieee"`, `"fast"`, None for torch's own setting.
        accumulate: micro-batches an update; their losses are averaged.
        clip_norm: largest 2-norm of all gradients together; None clips nothing.
        parallel: `"none"` or `"ddp"`; in a job of one process both do nothing.
        compile: True, or options for the compiler.
        graph: capture whole steps and launch each as one, which pays where a step is many short operators. For
            `trainer(batch)` on one rank, with a few shapes of batch. After three eager windows each shape of batch is
            captured when it comes for the second time; `aux` is then memory that the next step overwrites. With a
            dynamic loss scale the optimizer must be one whose kernel skips an overflowed step by itself.

    Attributes:
        model: the module that was given.
        optimizer, scheduler: as given.
        scaler: the loss scaler; one that does nothing where none is needed.
        forward: the model to call in a loop of one's own: compiled and replicated as asked.
        compiled: what became of `compile`; None where it was not asked for.
        aux: what the last `loss` returned beside the scalar.
        steps: windows closed so far.

    Raises:
        ConfigurationError: arguments that contradict each other.
        UnsupportedError: the backend does not declare what is asked for.
    """

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss | None = None,
        scheduler: LRScheduler | None = None,
        precision: str | Policy = "fp32",
        loss_scale: float | str | None = None,
        fp32: str | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        parallel: str = "none",
        compile: bool | Mapping[str, Any] = False,
        graph: bool = False,
    ) -> None:
        check_arguments(model, optimizer, scheduler, accumulate, clip_norm)
        check_declared(backend, model, compile, graph)
        policy = choose_policy(precision, loss_scale)
        self._backend = backend
        dtype = getattr(torch, policy.autocast) if policy.autocast else None
        # Nothing that is kept holds the trainer: such a cycle would hold the device's memory until it is collected.
        self._make_region: Callable[[], AbstractContextManager[object]] = partial(_autocast, backend, dtype)
        self._arithmetic: AbstractContextManager[object] = nullcontext()
        # One object, entered each step: making a context costs more than entering it.
        self._region = self._make_region()
        if fp32 is not None:
            backend.precision.fp32(fp32)  # refuses here what would be refused in the first step
            self._arithmetic = _Anew(partial(backend.precision.fp32, fp32))
            self._make_region = partial(_both, self._arithmetic, self._make_region)
            self._region = _Anew(self._make_region)
        self.scaler = _scaler(backend, policy.loss_scale)
        self._parallel = create_parallel(
            parallel, backend.capabilities.parallel, backend.collectives, backend.device
        )  # fmt: skip
        self.model = model.to(backend.device)
        self.optimizer = optimizer
        if optimizer.state:  # made with the optimizer, before the parameters were moved
            optimizer.load_state_dict(optimizer.state_dict())
        self.scheduler = scheduler
        self.forward: Callable[..., Any] = self._parallel.wrap(self.model)
        self.compiled: Compiled | None = None
        if compile is not False:
            self.compiled = backend.compiler.compile(self.forward, {} if compile is True else compile)
            self.forward = self.compiled.module
        self._overwrites = self.compiled is not None and self.compiled.overwrites
        self._accumulate = accumulate
        self._clip = None if clip_norm is None else Clipping(clip_norm)
        self._world_size = backend.collectives.world_size
        self.aux: Any = None
        self.steps = 0
        self._loss = loss if loss is not None else _loss_of_model
        self._parameters = list(model.parameters())
        self._micro = 0
        self._feeds: dict[str, Feed] = {}
        self._graphed: GraphedStep | None = None
        self._parallel.open(accumulate)
        self._clear()
        if graph:
            if self._world_size > 1:
                raise UnsupportedError("graph=True in a job of several ranks", remedy="leave graph out")
            if self._overwrites:
                raise ConfigurationError(
                    "graph=True, and a compiled model that is made of graphs, too",
                    remedy='leave graph=True out, or compile without graphs, as mode="default" does',
                )
            self._graphed = GraphedStep(backend.runtime, optimizer, sums=accumulate > 1)

    @property
    def skipped(self) -> int:
        """Windows whose update was skipped because a gradient overflowed. Reading it waits for the device."""
        return self.scaler.skipped

    @property
    def epoch(self) -> int:
        """The epoch of `batches` that is under way, or comes next; counted from 0."""
        return self._feed("train").epoch

    @property
    def accumulate(self) -> int:
        """Micro-batches an update, as given."""
        return self._accumulate

    def batches(self, loader: Iterable[Any], *, name: str = "train", shard: bool = True) -> Iterator[Any]:
        """One epoch of `loader`: on the device, this rank's share; at the end a short last window is flushed.

        After a `resume` in mid-epoch the first call yields what was left of that epoch. The batches before it are
        loaded again and dropped, which keeps random augmentation exact; save at an epoch's end where that costs too
        much. A position is counted from the batch that was last handed out, so save after training on it.

        Args:
            loader: a DataLoader, over a map-style or iterable dataset, or any iterable of batches. In a job of several
                ranks one with a plain sampler is given a `DistributedSampler`; of an iterable, which every rank must
                read in the same order, each rank gets every `world_size`-th batch and an incomplete last round is
                dropped.
            name: which of several streams this is; each has a position of its own, and only `"train"` is
                flushed. To evaluate, read a loader through `accel.runtime.to_device`: sharing it out would repeat or
                drop rows to give all ranks as many.
            shard: False where the loader already yields this rank's share.
        """
        self._check_job()
        yield from self._feed(name).batches(loader, shard=shard)
        if name == "train":
            self.flush()

    def __call__(self, batch: Any) -> Tensor:
        """Train on one micro-batch; the loss, detached and unscaled. Does not wait for the device."""
        if self._graphed is not None:
            return self._launch(self._graphed, batch)
        loss, self.aux = self._forward_backward(batch)
        self.update()
        return loss.detach().clone() if self._overwrites else loss.detach()

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return self._make_region()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, one micro-batch's mean.

        Raises:
            TrainingError: `loss` is not a scalar tensor that depends on the parameters, or the model that made it is
                not `trainer.forward` in a job of several ranks.
        """
        self._backward(loss, outlast=True)

    def _backward(self, loss: Tensor, *, outlast: bool) -> None:
        """Add the gradients; `outlast`: they have to outlast the next forward pass."""
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise no_loss(loss)
        self._parallel.check()
        scaled = self.scaler.scale(loss)
        # What backward starts from. Dividing the loss instead costs an operator here, and one in backward.
        share = None if self._accumulate == 1 else torch.full_like(scaled, 1 / self._accumulate)
        with self._arithmetic:
            scaled.backward(share)  # type: ignore[no-untyped-call]
        if self._overwrites and outlast:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        if self._micro == self._accumulate - 1:
            self._parallel.check_reduced()

    def update(self) -> bool:
        """Count a micro-batch; at the end of a window, update the parameters. True when a window was closed."""
        self._micro += 1
        if self._micro == self._accumulate:
            self._close()
            return True
        if self._micro == self._accumulate - 1:
            self._parallel.last()
        return False

    def flush(self) -> None:
        """Close a window that is not full, as the mean of the micro-batches it has; nothing where there is none."""
        if self._micro:
            self._check_job()
            self._parallel.reduce(self._parameters)
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad *= self._accumulate / self._micro
            self._close()

    def save(self, folder: str | Path, *, keep: int | None = None) -> Path:
        """Save all that is needed to go on as if nothing had happened, as a new checkpoint in `folder`.

        Model, optimizer, scaler, schedule, position in the data, random states, gradients of an open window. It
        appears whole or not at all. In a job every rank calls this, with a folder that all of them share.

        Args:
            keep: delete all but the newest `keep` checkpoints afterwards; None deletes nothing.

        Returns:
            The checkpoint: a folder named after the number of steps.
        """
        from accelcore.training.state import save

        self._check_job()
        return save(self, Path(folder), keep)

    def resume(self, folder: str | Path) -> Path | None:
        """Go on from the newest checkpoint in `folder`, or from `folder` if it is itself one.

        Returns:
            The checkpoint, or None where there is none.

        Raises:
            CheckpointError: it is damaged, or belongs to another model; this trainer is left as it was.
        """
        from accelcore.training.state import resume

        self._check_job()
        return resume(self, Path(folder))

    def _forward_backward(self, batch: Any) -> tuple[Tensor, Any]:
        with self._region:
            loss = self._loss(self.forward, batch)
        aux = None
        if type(loss) is tuple:
            loss, aux = loss
        self._backward(loss, outlast=self._micro < self._accumulate - 1)
        return loss, aux

    def _launch(self, graphed: GraphedStep, batch: Any) -> Tensor:
        last = self._micro == self._accumulate - 1
        loss, self.aux = graphed(
            batch, self._forward_backward, self._update_parameters, first=self._micro == 0, last=last
        )  # fmt: skip
        self._micro += 1
        if last:
            self._end_window()
        return loss

    def _close(self) -> None:
        self._update_parameters()
        self._end_window()

    def _update_parameters(self) -> None:
        if self._clip is not None:
            self.scaler.unscale_(self.optimizer)
            # Those the optimizer has, and no others: others were not unscaled, and are not looked at for overflow.
            trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self._clip(trained)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._clear()

    def _end_window(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        self._micro = 0
        self.steps += 1
        self._parallel.open(self._accumulate)

    def _check_job(self) -> None:
        if self._backend.collectives.world_size != self._world_size:
            raise DistributedError(
                f"this trainer was made in a job of {self._world_size}, and the job now has "
                f"{self._backend.collectives.world_size} ranks",
                remedy="make the trainer, and use it, inside one `with accel.distributed():`",
            )

    def _restart(self, micro: int, gradients: Mapping[str, Tensor]) -> None:
        """Be at a saved place within a window."""
        if self._graphed is not None:
            self._graphed.forget()
        self._clear()
        for name, parameter in self.model.named_parameters():
            if name in gradients:
                parameter.grad = torch.empty_like(parameter).copy_(gradients[name])
        self._micro = micro
        self._parallel.open(self._accumulate)
        if micro == self._accumulate - 1:
            self._parallel.last()

    def _clear(self) -> None:
        if self._graphed is not None and self._graphed.holds_gradients:
            self._graphed.clear()
        else:
            for parameter in self._parameters:
                parameter.grad = None

    def _feed(self, name: str) -> Feed:
        if name not in self._feeds:
            self._feeds[name] = Feed(self._backend.runtime, self._backend.collectives)
        return self._feeds[name]


class _Anew:
    """A context that is made each time it is entered, where the one made could be entered only once."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> object:
        self._entered.append(self._make())
        return self._entered[-1].__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)


def _autocast(backend: Backend, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else backend.precision.autocast(dtype)


@contextmanager
def _both(
    outer: AbstractContextManager[object], make_inner: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    with outer, make_inner():
        yield


def _loss_of_model(model: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    return model(batch)


def _scaler(backend: Backend, loss_scale: float | str | None) -> LossScaler:
    if loss_scale is None:
        return backend.scaler.none()
    if loss_scale == "dynamic":
        return backend.scaler.create()
    return backend.scaler.create(init=float(loss_scale), dynamic=False)
