"""Observe, Compile and Capture: register observers, compile the model, record whole steps as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError, notice
from accelcore.randomness import draws_on_host
from accelcore.torch_internals import in_backward
from accelcore.training.captured import CapturedStep, check_capturable
from accelcore.training.observers import Hooks
from accelcore.training.plan import Plan, Stage


class Observe(Stage):
    """Register a forward hook on each module if an observer overrides `output`."""

    def __init__(self) -> None:
        self._hooks = Hooks()

    def check(self, plan: Plan) -> None:
        listeners = plan.listeners
        if plan.options["graph"] and (listeners.measures_norm or listeners.overflow or listeners.output):
            raise ConfigurationError(
                "an observer of gradient norms, overflows or module outputs cannot be used with graph=True",
                remedy="remove graph=True while you look, or observe losses and steps only",
            )

    def apply(self, plan: Plan) -> None:
        if plan.options["graph"]:
            plan.listeners.gradient_norm = []  # each graph has a norm of its own
        if plan.backend.collectives.world_size > 1:  # ranks compute a norm together, also if one observes it alone
            asked = torch.tensor(float(plan.listeners.measures_norm), device=plan.backend.device)
            plan.listeners.measures_norm = bool(plan.backend.collectives.all_reduce(asked, "max"))
        self._hooks.close()
        for listener in plan.listeners.output:
            for name, module in plan.model.named_modules():
                self._hooks.add(module.register_forward_hook(_Tell(listener, name)))


class _Tell:
    """Forward hook that calls a listener. A copy of the model calls the same listener."""

    def __init__(self, listener: Callable[[str, Any], None], name: str) -> None:
        self._listener, self._name = listener, name

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not in_backward():
            self._listener(self._name, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tell:
        return self


class Compile(Stage):
    """Let the backend compile the model, after it was replicated."""

    def check(self, plan: Plan) -> None:
        wanted = plan.options["compile"]
        if wanted is False:
            return
        if not isinstance(wanted, bool | Mapping):
            raise ConfigurationError(
                f"compile={wanted!r} is not an option of the compiler",
                available='True, False, or options such as {"mode": "max-autotune"}',
            )
        if not plan.backend.capabilities.compilers:
            raise UnsupportedError(f"{plan.backend.name} declares no compiler", remedy="remove compile")
        self._options: Mapping[str, Any] = wanted if isinstance(wanted, Mapping) else {}
        if plan.compiled is None:
            plan.backend.compiler.check(self._options)
        if plan.options["graph"]:
            compiled = plan.compiled or plan.backend.compiler.compile(nn.Identity(), self._options)
            if compiled.overwrites:
                raise ConfigurationError(
                    "graph=True cannot be combined with a compiled model that captures graphs itself",
                    remedy='remove graph=True, or compile without graphs: mode="default"',
                )

    def apply(self, plan: Plan) -> None:
        if plan.options["compile"] is not False:
            assert isinstance(plan.forward, nn.Module), "no earlier stage makes anything else"
            plan.compiled = plan.backend.compiler.compile(plan.forward, self._options)
            plan.forward = plan.compiled.module
            if plan.compiled.compiled and plan.backend.collectives.rank == 0:
                notice("the model will be compiled in its first steps, which take longer")


class Capture(Stage):
    """Make the object that captures steps, if `graph=True`."""

    def check(self, plan: Plan) -> None:
        if not plan.options["graph"]:
            return
        if not plan.backend.capabilities.graphs:
            why = "graph=True replays a step that the device has captured, and this backend declares no graphs"
            raise UnsupportedError(f"{plan.backend.name} cannot capture steps", why=why, remedy="remove graph=True")
        if plan.backend.collectives.world_size > 1:
            raise UnsupportedError("graph=True is not available in a job of several ranks", remedy="remove graph=True")
        if draws_on_host():
            raise UnsupportedError(
                'graph=True cannot be used after runtime.seed(..., same="everywhere")',
                remedy="remove graph=True, or seed without same",
            )
        check_capturable(plan.optimizer)

    def apply(self, plan: Plan) -> None:
        if plan.options["graph"]:
            sums = plan.options["accumulate"] > 1
            plan.captured = CapturedStep(plan.backend.runtime, plan.optimizer, plan.gradients, sums=sums)
