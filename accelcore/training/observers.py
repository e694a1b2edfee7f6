"""Callbacks for loss, gradient norm, overflow, step and module outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Listeners", "Observer"]


class Observer:
    """Base class of observers: override the events you need. Events without an observer cost nothing.

    Tensors are on the device; reading one on the host waits for the device. An exception of an observer ends the
    trainer's call after the step is complete.
    """

    def loss(self, loss: Tensor) -> None:
        """Receive the loss of a micro-batch, detached and unscaled."""

    def gradient_norm(self, norm: Tensor) -> None:
        """Receive the 2-norm of all gradients of a window: reduced over ranks, unscaled, before clipping."""

    def overflow(self, found: Tensor) -> None:
        """Receive 1.0 if a window's gradients overflowed and its update was skipped, else 0.0. Needs a loss scale."""

    def step(self, steps: int) -> None:
        """Receive the number of windows closed so far, after each window."""

    def output(self, module: str, output: Any) -> None:
        """Receive the output of a module in a forward pass, with the module's name."""


class Listeners:
    """For each event, the methods of the observers that override it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.loss = _listeners(observers, "loss")
        self.gradient_norm = _listeners(observers, "gradient_norm")
        self.overflow = _listeners(observers, "overflow")
        self.step = _listeners(observers, "step")
        self.output = _listeners(observers, "output")


def _listeners(observers: Sequence[Observer], event: str) -> list[Callable[..., None]]:
    return [getattr(each, event) for each in observers if getattr(type(each), event) is not getattr(Observer, event)]
