"""Contract of the role `compiler`, and its default by torch.compile."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError, logger
from accelcore.known_faults import AUTOCAST_IN_CACHE, BACKWARD_UNDER_AUTOCAST, GUARDS_BY_DICT, KnownFault
from accelcore.randomness import draws_on_host
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST
from accelcore.torch_internals import (
    backward_outside_autocast,
    compiler_error,
    guards_on_tensors,
    is_autocast_enabled,
    without_graph_cache,
)

__all__ = ["Compiled", "Compiler", "NoCompiler", "TorchCompiler"]

_USUAL = nullcontext()


@dataclass
class Compiled:
    """Result of a request to compile.

    Attributes:
        module: the callable to use; it shares the module's parameters.
        compiled: whether it runs compiled. Becomes false if the compiler fails at the first call.
        reason: why it runs eagerly, if it does.
        overwrites: whether its next call overwrites its outputs and gradients, as CUDA graphs do. The trainer copies
            what it needs for longer.
        avoids: known bugs of the installed compiler, with their workarounds.
    """

    module: Callable[..., Any]
    compiled: bool
    reason: str = ""
    overwrites: bool = False
    avoids: tuple[KnownFault, ...] = ()


class Compiler(ABC):
    """Role of a backend that compiles modules."""

    def check(self, options: Mapping[str, Any]) -> None:  # most compilers check them only when they compile
        """Raise ConfigurationError if `compile` would refuse the options."""

    @abstractmethod
    def compile(self, module: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
        """Compile `module` with options of the compiler (for torch.compile: `mode`, `dynamic`, `fullgraph`...).

        `{"backend": name}` chooses a declared compiler. If compilation fails, here or in the first forward pass, the
        module runs eagerly, and the log gives the reason once. A compiler that fails in backward raises there. Run
        backward outside autocast; it uses the same dtypes as without a compiler.

        Raises:
            ConfigurationError: unknown option.
            UnsupportedError: the backend declares no compiler.
        """


_SWITCHES = "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"  # torch's environment variables


class NoCompiler(Compiler):
    """Compiler of a backend that declares none."""

    def compile(self, module: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
        raise UnsupportedError("this backend declares no compiler", remedy="remove compile")


class TorchCompiler(Compiler):
    """Compilation by torch.compile.

    Args:
        missing: returns why this machine cannot compile, or None. Called before each compilation.
        avoids: bugs of this device's compiler for which the backend has workarounds, beside torch's own.
    """

    def __init__(self, missing: Callable[[], str | None] = lambda: None, avoids: Sequence[KnownFault] = ()) -> None:
        self._missing = missing
        of_torch = (BACKWARD_UNDER_AUTOCAST, AUTOCAST_IN_CACHE, GUARDS_BY_DICT)
        self._avoids = tuple(fault for fault in (*of_torch, *avoids) if fault.applies)

    def check(self, options: Mapping[str, Any]) -> None:
        if self._missing() is None:
            _compile(nn.Identity(), options)

    def compile(self, module: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
        reason = self._missing()
        if draws_on_host():
            reason = 'compiled modules draw other random numbers than runtime.seed(..., same="everywhere") promises'
        for name in _SWITCHES:
            if os.environ.get(name) == "1":
                reason = f"{name}=1 is set, by which torch.compile compiles nothing"
        if reason is not None:
            logger.warning("the model runs eagerly, not compiled: %s", reason)
            return Compiled(module, compiled=False, reason=reason)
        compiled = _compile(module, options)
        result = Compiled(module, compiled=True, avoids=self._avoids)
        result.module = _Guarded(module, compiled, result)
        return result


def _compile(module: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        compiled: Callable[..., Any] = torch.compile(module, **options)
    except Exception as error:
        raise ConfigurationError(
            f"torch.compile refuses the options {dict(options)!r}",
            why=f"{type(error).__name__}: {error}",
            remedy="give compile=True, or options of torch.compile",
        ) from error
    return compiled


class _Guarded:
    """Calls the compiled module; if the compiler fails, calls the eager module from then on.

    torch.compile compiles, and fails, at the first call. Errors of the model itself are raised unchanged. If a part of
    the model ran before another failed to compile, it runs twice: it draws random numbers and counts a batch again.
    """

    def __init__(self, eager: nn.Module, compiled: Callable[..., Any], result: Compiled) -> None:
        self._eager, self._call, self._result = eager, compiled, result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._eager, name)  # a loss function may call other methods of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._result.compiled and is_autocast_enabled() and not BACKWARD_PASS_AUTOCAST.present:
            self._run_eagerly(
                f"torch {torch.__version__} has no {BACKWARD_PASS_AUTOCAST}, and would compile the whole backward pass "
                "under autocast in low precision; torch 2.10 has it"
            )
        cache = without_graph_cache() if is_autocast_enabled() and AUTOCAST_IN_CACHE in self._result.avoids else _USUAL
        guards = guards_on_tensors() if GUARDS_BY_DICT in self._result.avoids else _USUAL
        try:
            with backward_outside_autocast(), cache, guards:  # the workarounds of the three known faults
                return self._call(*args, **kwargs)
        except compiler_error() as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # Dynamo's first line names the backend, the second one its error.
            self._run_eagerly(f"the compiler failed: {' '.join(line.strip() for line in lines[:2])}")
            return self._eager(*args, **kwargs)

    def _run_eagerly(self, reason: str) -> None:
        logger.warning("the model runs eagerly: %s", reason)
        self._result.compiled, self._result.reason, self._result.module = False, reason, self._eager
        self._call = self._eager
