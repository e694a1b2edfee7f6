"""Compile and Capture: let the backend compile the model, or record whole steps as graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.randomness import draws_on_host
from accelcore.training.captured import CapturedStep, check_capturable
from accelcore.training.plan import Plan

__all__ = ["Capture", "Compile"]


class Compile:
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
            raise UnsupportedError(f"{plan.backend.name} declares no compiler", remedy="leave compile out")
        self._options: Mapping[str, Any] = wanted if isinstance(wanted, Mapping) else {}
        if plan.compiled is None:
            plan.backend.compiler.check(self._options)

    def apply(self, plan: Plan) -> None:
        if plan.options["compile"] is not False:
            assert isinstance(plan.forward, nn.Module), "no earlier stage makes anything else"
            plan.compiled = plan.backend.compiler.compile(plan.forward, self._options)
            plan.forward = plan.compiled.module


class Capture:
    """Make the object that captures steps, if `graph=True`."""

    def check(self, plan: Plan) -> None:
        if not plan.options["graph"]:
            return
        if not plan.backend.capabilities.graphs:
            raise UnsupportedError(f"{plan.backend.name} cannot capture steps", remedy="leave graph=True out")
        if plan.backend.collectives.world_size > 1:
            raise UnsupportedError(
                "graph=True is not available in a job of several ranks", remedy="leave graph=True out"
            )
        if draws_on_host():
            raise UnsupportedError(
                'graph=True cannot be used after runtime.seed(..., same="everywhere")',
                why="random numbers are drawn on the host then, which a graph would do once for all its launches",
                remedy="leave graph=True out, or seed without same",
            )
        check_capturable(plan.optimizer)

    def apply(self, plan: Plan) -> None:
        if plan.options["graph"]:
            if plan.compiled is not None and plan.compiled.overwrites:
                raise ConfigurationError(
                    "graph=True cannot be combined with a compiled model that captures graphs itself",
                    remedy='leave graph=True out, or compile without graphs: mode="default"',
                )
            sums = plan.options["accumulate"] > 1
            plan.captured = CapturedStep(plan.backend.runtime, plan.optimizer, plan.gradients, sums=sums)
