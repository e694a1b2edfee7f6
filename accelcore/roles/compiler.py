"""Compiler: a faster version of a module, or the module itself and the reason why."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Compiled", "Compiler", "TorchCompiler"]

logger = logging.getLogger("accelcore")


@dataclass
class Compiled:
    """What became of a request to compile.

    Attributes:
        module: what to call in place of the module; it shares the module's parameters.
        compiled: whether it runs compiled. Turns false where the compiler fails at the first call.
        reason: why it runs eagerly, where it does.
    """

    module: Callable[..., Any]
    compiled: bool
    reason: str = ""


class Compiler(ABC):
    """How a backend compiles."""

    @abstractmethod
    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> Compiled:
        """Compile `module` with `options` of the compiler (for torch.compile: `mode`, `dynamic`, `fullgraph`...).

        Never takes a run down: what cannot be compiled runs eagerly, and the log says so once, with the reason.
        """


class TorchCompiler(Compiler):
    """Compilation by torch.compile.

    Args:
        missing: looked at before each compilation: the reason why this machine cannot compile, or None.
    """

    def __init__(self, missing: Callable[[], str | None] = lambda: None) -> None:
        self._missing = missing

    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> Compiled:
        reason = self._missing()
        if reason is not None:
            logger.warning("the model runs eagerly, not compiled: %s", reason)
            return Compiled(module, compiled=False, reason=reason)
        result = Compiled(module, compiled=True)
        result.module = _FirstCall(module, torch.compile(module, **options), result)
        return result


class _FirstCall:
    """Calls the compiled module; where its compiler fails at the first call, calls the eager one from then on.

    torch.compile compiles when it is first called, so only then does it fail. An error of the model's own is raised
    again by the eager call, and so reaches the user as it would without a compiler.
    """

    def __init__(self, eager: nn.Module, compiled: Callable[..., Any], result: Compiled) -> None:
        self._eager, self._compiled, self._result = eager, compiled, result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().split("\n", 1)[0]
            logger.warning("the model runs eagerly, the compiler failed: %s", reason)
            self._result.compiled, self._result.reason, self._result.module = False, reason, self._eager
            self._compiled = self._eager
            return self._eager(*args, **kwargs)
        return output
