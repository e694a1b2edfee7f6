"""Compile: replace the model to call by a compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.training.plan import Plan

__all__ = ["Compile"]


class Compile:
    """Let the backend compile the model, after it was replicated."""

    def check(self, plan: Plan) -> None:
        wanted = plan.options["compile"]
        if not isinstance(wanted, bool | Mapping):
            raise ConfigurationError(
                f"compile={wanted!r} is not an option of the compiler",
                available='True, False, or options such as {"mode": "max-autotune"}',
            )
        if wanted is not False and not plan.backend.capabilities.compilers:
            raise UnsupportedError(f"{plan.backend.name} declares no compiler", remedy="leave compile out")
        if plan.compiled is None and wanted is not False:
            plan.backend.compiler.check(_options(wanted))

    def apply(self, plan: Plan) -> None:
        wanted = plan.options["compile"]
        if wanted is not False:
            assert isinstance(plan.forward, nn.Module), "no earlier stage makes anything else"
            plan.compiled = plan.backend.compiler.compile(plan.forward, _options(wanted))
            plan.forward = plan.compiled.module


def _options(wanted: bool | Mapping[str, Any]) -> Mapping[str, Any]:
    return wanted if isinstance(wanted, Mapping) else {}
