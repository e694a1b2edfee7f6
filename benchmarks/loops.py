"""One and the same training, as loops written with torch alone, with accelcore, and with its peers.

Each function returns a callable that trains on every batch once. What can be made before the first step is made
outside it. The loss is `cross_entropy(model(inputs), targets)`, the optimizer the one that is given.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import accelcore

__all__ = [
    "Batches",
    "Loop",
    "Task",
    "accelcore_calls",
    "accelcore_flat",
    "accelcore_trainer",
    "accelerate",
    "accelerate_accumulate",
    "by_hand",
    "fabric",
    "forward_and_backward",
    "mmengine",
]

Batches = Sequence[tuple[Tensor, Tensor]]
Pass = Callable[[], None]


@dataclass(frozen=True)
class Task:
    """How to train.

    Attributes:
        precision: "fp32", or "bf16" for a forward pass under autocast.
        accumulate: batches an update.
        clip_norm: largest 2-norm of the gradients together; None clips nothing.
    """

    precision: str = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None


Loop = Callable[[Task, nn.Module, Optimizer, Batches], Pass]


def by_hand(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """As one would write it for exactly this task: nothing in it asks what the task is."""

    def plain() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    def bf16() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    def clipped() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()

    def accumulated() -> None:
        for number, (inputs, targets) in enumerate(batches, start=1):
            loss = cross_entropy(model(inputs), targets) / task.accumulate
            loss.backward()
            if number % task.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    if task.clip_norm is not None:
        return clipped
    if task.accumulate > 1:
        return accumulated
    return bf16 if task.precision == "bf16" else plain


def forward_and_backward(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """As by hand in fp32, but for the update: what no optimizer, and nobody around it, can save."""
    parameters = list(model.parameters())

    def train() -> None:
        for inputs, targets in batches:
            cross_entropy(model(inputs), targets).backward()
            for parameter in parameters:
                parameter.grad = None

    return train


def accelcore_trainer(
    task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches, *, flat: bool | None = None
) -> Pass:
    """`trainer(batch)`; `flat=None` lets the trainer choose."""

    def loss(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    trainer = _trainer(task, model, optimizer, loss, flat=flat)

    def train() -> None:
        for batch in batches:
            trainer(batch)

    return train


def accelcore_flat(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """`trainer(batch)`, parameters and gradients in one piece of memory."""
    return accelcore_trainer(task, model, optimizer, batches, flat=True)


def accelcore_calls(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """The three calls that `trainer(batch)` is short for."""
    trainer = _trainer(task, model, optimizer, None, flat=None)

    def train() -> None:
        for inputs, targets in batches:
            with trainer.autocast():
                loss = cross_entropy(trainer.forward(inputs), targets)
            trainer.backward(loss)
            trainer.update()

    return train


def accelerate(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """accelerate as its guide begins: `prepare` and `backward`."""
    accelerator, model, optimizer = _accelerated(task, model, optimizer)

    def train() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if task.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()

    return train


def accelerate_accumulate(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """accelerate with its context for accumulation, which decides whether the optimizer does anything."""
    accelerator, model, optimizer = _accelerated(task, model, optimizer)

    def train() -> None:
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if task.clip_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), task.clip_norm)
                optimizer.step()
                optimizer.zero_grad()

    return train


def fabric(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """Lightning Fabric: `setup` and `backward`, accumulation by hand as its guide has it."""
    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces the precision each time
    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[task.precision]
    lightning = Fabric(accelerator="cpu", devices=1, precision=precision)
    model, optimizer = lightning.setup(model, optimizer)

    def train() -> None:
        for number, (inputs, targets) in enumerate(batches, start=1):
            loss = cross_entropy(model(inputs), targets)
            lightning.backward(loss / task.accumulate if task.accumulate > 1 else loss)
            if number % task.accumulate == 0:
                if task.clip_norm is not None:
                    lightning.clip_gradients(model, optimizer, max_norm=task.clip_norm, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()

    return train


def mmengine(task: Task, model: nn.Module, optimizer: Optimizer, batches: Batches) -> Pass:
    """MMEngine's wrapper of an optimizer, as its runner calls it; without the runner's hooks."""
    with warnings.catch_warnings():  # it scripts a function when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from mmengine.optim import OptimWrapper

    clipping = None if task.clip_norm is None else {"max_norm": task.clip_norm}
    wrapper = OptimWrapper(optimizer, accumulative_counts=task.accumulate, clip_grad=clipping)
    wrapper.initialize_count_status(model, 0, 2**62)  # it counts up to the end, which never comes

    def train() -> None:
        for inputs, targets in batches:
            with wrapper.optim_context(model):
                loss = cross_entropy(model(inputs), targets)
            wrapper.update_params(loss)

    return train


def _trainer(
    task: Task, model: nn.Module, optimizer: Optimizer, loss: Callable[..., Tensor] | None, *, flat: bool | None
) -> accelcore.Trainer:
    return accelcore.select("cpu").trainer(
        model,
        optimizer,
        loss=loss,
        precision=task.precision,
        accumulate=task.accumulate,
        clip_norm=task.clip_norm,
        flat=flat,
    )


def _accelerated(task: Task, model: nn.Module, optimizer: Optimizer) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    # One process has one state, and refuses a second precision; here no two precisions are measured at once.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    precision = {"fp32": "no", "bf16": "bf16"}[task.precision]
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=task.accumulate)
    return accelerator, *accelerator.prepare(model, optimizer)
