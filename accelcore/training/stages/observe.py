"""Observe: register hooks for observers of module outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import in_backward
from accelcore.training.observers import Hooks, Listeners, Observer
from accelcore.training.plan import Plan

__all__ = ["Observe"]


class Observe:
    """Register a forward hook on each module if an observer overrides `output`."""

    def __init__(self) -> None:
        self._hooks = Hooks()

    def check(self, plan: Plan) -> None:
        observers = plan.options["observers"]
        strange = [each for each in observers if not isinstance(each, Observer)]
        if strange:
            raise ConfigurationError(
                f"observers= has {strange[0]!r}, which is not an observer",
                remedy="derive its class from accelcore.Observer",
            )
        plan.listeners = listeners = Listeners(observers)
        if plan.options["graph"] and (listeners.gradient_norm or listeners.overflow or listeners.output):
            raise ConfigurationError(
                "an observer of gradient norms, overflows or module outputs cannot be used with graph=True",
                remedy="leave graph=True out while you look, or observe losses and steps only",
            )

    def apply(self, plan: Plan) -> None:
        self._hooks.close()
        for listener in plan.listeners.output:
            for name, module in plan.model.named_modules():
                self._hooks.callback(module.register_forward_hook(_Tell(listener, name)).remove)


class _Tell:
    """Forward hook that calls a listener. A copy of the model calls the same listener."""

    def __init__(self, listener: Callable[[str, Any], None], name: str) -> None:
        self._listener, self._name = listener, name

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not in_backward():
            self._listener(self._name, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tell:
        return self
