"""Observe: modules are watched for those who want to see their outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accelcore.errors import ConfigurationError
from accelcore.training.observers import Observer, Telling
from accelcore.training.plan import Plan

__all__ = ["Observe"]


class Observe:
    """Registers a forward hook on each module, where an observer wants outputs; else nothing."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def check(self, plan: Plan) -> None:
        observers = plan.options["observers"]
        strange = [each for each in observers if not isinstance(each, Observer)]
        if strange:
            raise ConfigurationError(
                f"{strange[0]!r} is no observer", remedy="derive its class from accelcore.Observer"
            )
        plan.telling = telling = Telling(observers)
        if plan.options["graph"] and (telling.gradient_norm or telling.overflow or telling.output):
            raise ConfigurationError(
                "an observer wants to see within a step, and graph=True launches steps whole",
                remedy="leave graph=True out while you look, or observe losses and steps only",
            )

    def apply(self, plan: Plan) -> None:
        self.remove()
        for listener in plan.telling.output:
            for name, module in plan.model.named_modules():
                self._handles.append(module.register_forward_hook(partial(_tell, listener, name)))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __del__(self) -> None:
        self.remove()


def _tell(listener: Callable[[str, Any], None], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    listener(name, output)
