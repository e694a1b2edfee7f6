"""Callbacks for loss, gradient norm, learning rate, step and others; hooks that are removed with their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from inspect import isfunction
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from accelcore.errors import ConfigurationError
from accelcore.util.text import kind_of

_everywhere: list[Observer] = []  # observers of every trainer that is made, while their contexts are open


class Observer:
    """Base class of observers: override the events you need. Events without an observer cost nothing.

    Tensors are on the device; reading one on the host waits for the device. An exception of an observer ends the
    trainer's call after the step is complete. After an update the order is loss, gradient norm, overflow, learning
    rate, step.

    Example:
        >>> class Losses(accelcore.Observer):
        ...     def loss(self, loss):
        ...         print("the loss is a", type(loss).__name__)
        >>> trainer = accel.trainer(model, optimizer, loss=loss, observers=[Losses()])
        >>> value = trainer(batch)
        the loss is a Tensor

    Attributes:
        measures_norm: whether `gradient_norm` needs the norm without `clip_norm`, which computes it anyway.
    """

    measures_norm: bool = True

    def begin(self, trainer: Any) -> None:
        """Receive the `Trainer` once, when it is made: a weak proxy, which does not keep the trainer alive."""

    def epoch_begin(self, epoch: int) -> None:
        """Receive the number of an epoch of `trainer.batches(loader)`, counted from 0, before its first batch."""

    def batch(self, batch: Any) -> None:
        """Receive each batch of `trainer.batches(loader)`, on the device, before the loop does."""

    def epoch_end(self, epoch: int) -> None:
        """Receive the number of an epoch of `trainer.batches(loader)` after its last update."""

    def loss(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch, detached and unscaled."""

    def gradient_norm(self, norm: Tensor) -> None:
        """Receive the 2-norm of all gradients of a window: reduced over ranks, unscaled, before clipping.

        If one rank has such an observer, all ranks compute the norm. With `graph=True` it is not called: each graph has
        a norm of its own.
        """

    def overflow(self, found: Tensor) -> None:
        """Receive 1.0 if a window's gradients overflowed and its update was skipped, else 0.0. Needs a loss scale."""

    def learning_rate(self, lr: float | Tensor) -> None:
        """Receive the learning rate of the first group in this window. The optimizer already has the next one."""

    def step(self, steps: int) -> None:
        """Receive the number of windows closed so far, after each window."""

    def output(self, module: str, output: Any) -> None:
        """Receive the output of a module in a forward pass, with the module's name."""


EVENTS = tuple(name for name, member in vars(Observer).items() if isfunction(member))
"""The methods of `Observer` that may be overridden."""


class Hooks(ExitStack):
    """Calls that remove hooks from the user's model, made by `close` or when this object is deleted with its owner."""

    def add(self, *handles: RemovableHandle) -> None:
        for handle in handles:
            self.callback(handle.remove)

    def __del__(self) -> None:
        self.close()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Give an observer to each trainer that is made in this context: for a program that runs a script of others."""
    _everywhere.append(observer)
    try:
        yield
    finally:
        _everywhere.remove(observer)


def tell(listeners: Iterable[Callable[..., None]], value: object) -> None:
    """Call the methods of an event with its value; None: it did not happen."""
    if value is not None:
        for listener in listeners:
            listener(value)


class Listeners:
    """For each event, the methods of the observers that override it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        _check(observers)
        observers = [*observers, *(each for each in _everywhere if each not in observers)]
        self.begin = _listeners(observers, "begin")
        self.epoch_begin = _listeners(observers, "epoch_begin")
        self.batch = _listeners(observers, "batch")
        self.epoch_end = _listeners(observers, "epoch_end")
        self.reads_data = bool(self.begin or self.epoch_begin or self.batch or self.epoch_end)
        self.loss = _listeners(observers, "loss")
        measuring = [each for each in observers if each.measures_norm]
        self.measures_norm = bool(_listeners(measuring, "gradient_norm"))
        self.gradient_norm = _listeners(observers, "gradient_norm")
        self.overflow = _listeners(observers, "overflow")
        self.learning_rate = _listeners(observers, "learning_rate")
        self.step = _listeners(observers, "step")
        self.output = _listeners(observers, "output")


def observed(batches: Iterator[Any], listeners: Listeners, epoch_now: Callable[[], int]) -> Iterator[Any]:
    """Yield the batches of an epoch, and call the listeners of data and epochs."""
    epoch = None
    with closing(batches):  # type: ignore[type-var]  # a generator; a loop that is left early ends the epoch
        for batch in batches:
            if epoch is None:
                epoch = epoch_now()
                tell(listeners.epoch_begin, epoch)
            for receive in listeners.batch:
                receive(batch)
            yield batch
    if epoch is not None:
        tell(listeners.epoch_end, epoch)


def _check(observers: Sequence[object]) -> None:
    """Raise ConfigurationError for a value of `observers=` that would never be called."""
    for each in observers:
        if not isinstance(each, Observer):
            name = each.__name__ if isinstance(each, type) else ""
            remedy = f"make one: {name}(...)" if name else "derive its class from accelcore.Observer"
            raise ConfigurationError(f"observers= has {each!r}, which is not an observer", remedy=remedy)
        if not any(overrides(each, event) for event in EVENTS):
            raise ConfigurationError(
                f"observers= has {kind_of(each)}, which overrides no event and would never be called",
                available=", ".join(EVENTS),
                remedy="give its methods the names of events",
            )


def overrides(observer: Observer, event: str) -> bool:
    """Return whether an observer's class has a method of its own for an event."""
    return getattr(type(observer), event) is not getattr(Observer, event)


def _listeners(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    return [getattr(each, event) for each in observers if overrides(each, event)]
