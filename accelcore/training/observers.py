"""Observers: objects that a training tells what happens in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["Listeners", "Observer"]


class Observer:
    """Override what you want to be told of; what no observer overrides costs nothing.

    Tensors are on the device, and reading one on the host waits for it. What an observer raises ends the call of the
    trainer that told it, after the step is whole.
    """

    def loss(self, loss: Tensor) -> None:
        """A micro-batch was trained on: its loss, detached and unscaled."""

    def gradient_norm(self, norm: Tensor) -> None:
        """The 2-norm of a window's gradients together: reduced over ranks, unscaled, not yet clipped."""

    def overflow(self, found: Tensor) -> None:
        """1.0 where a window's gradients overflowed, and its update is skipped, else 0.0. Only with a loss scale."""

    def step(self, steps: int) -> None:
        """A window was closed, the `steps`-th."""

    def output(self, module: str, output: Any) -> None:
        """A module of the model, by name, returned `output` in a forward pass."""


class Listeners:
    """For each thing that can be told, who wants to hear it."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.loss = _listeners(observers, "loss")
        self.gradient_norm = _listeners(observers, "gradient_norm")
        self.overflow = _listeners(observers, "overflow")
        self.step = _listeners(observers, "step")
        self.output = _listeners(observers, "output")


def _listeners(observers: Sequence[Observer], what: str) -> list[Callable[..., None]]:
    return [getattr(each, what) for each in observers if getattr(type(each), what) is not getattr(Observer, what)]
