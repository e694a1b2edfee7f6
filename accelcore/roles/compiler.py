"""Compiler: a faster version of a module, or the module itself and the reason why."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.known_faults import BACKWARD_UNDER_AUTOCAST, KnownFault
from accelcore.randomness import draws_on_host
from accelcore.torch_internals import backward_outside_autocast, compiler_error

__all__ = ["Compiled", "Compiler", "NoCompiler", "TorchCompiler"]

logger = logging.getLogger("accelcore")


@dataclass
class Compiled:
    """What became of a request to compile.

    Attributes:
        module: what to call in place of the module; it shares the module's parameters.
        compiled: whether it runs compiled. Turns false where the compiler fails at the first call.
        reason: why it runs eagerly, where it does.
        overwrites: whether what it returns, and the gradients it gives, are memory that its next call writes anew, as
            with CUDA graphs. The trainer copies what has to outlast that.
        avoids: what is known to be wrong with the compiler in the installed version; each says what is done instead.
    """

    module: Callable[..., Any]
    compiled: bool
    reason: str = ""
    overwrites: bool = False
    avoids: tuple[KnownFault, ...] = ()


class Compiler(ABC):
    """How a backend compiles."""

    def check(self, options: Mapping[str, Any]) -> None:  # noqa: B027  # most can tell only when they compile
        """Raise ConfigurationError for options that `compile` would refuse."""

    @abstractmethod
    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> Compiled:
        """Compile `module` with `options` of the compiler (for torch.compile: `mode`, `dynamic`, `fullgraph`...).

        `{"backend": name}` chooses among the compilers that are declared. What cannot be compiled, here or in its first
        forward pass, runs eagerly; the log says so once, with the reason. A compiler that fails in backward raises
        there. Backward computes in the dtypes that it has without a compiler, and is to be run outside autocast.

        Raises:
            ConfigurationError: there is no such option.
            UnsupportedError: the backend declares no compiler.
        """


_DRAWS = 'compilers draw numbers of their own, and runtime.seed(..., same="everywhere") asks for others'


class NoCompiler(Compiler):
    """The compiler of a backend that declares none."""

    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> Compiled:
        raise UnsupportedError("this backend declares no compiler", remedy="leave compile out")


class TorchCompiler(Compiler):
    """Compilation by torch.compile.

    Args:
        missing: looked at before each compilation: the reason why this machine cannot compile, or None.
        avoids: faults of this device's compiler that the backend goes around, beside those of torch in general.
    """

    def __init__(self, missing: Callable[[], str | None] = lambda: None, avoids: Sequence[KnownFault] = ()) -> None:
        self._missing = missing
        self._avoids = tuple(fault for fault in (BACKWARD_UNDER_AUTOCAST, *avoids) if fault.applies)

    def check(self, options: Mapping[str, Any]) -> None:
        if self._missing() is None:
            _compile(nn.Identity(), options)

    def compile(self, module: nn.Module, options: Mapping[str, Any]) -> Compiled:
        reason = _DRAWS if draws_on_host() else self._missing()
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
            f"torch.compile refuses the options {dict(options)!r}", why=f"{type(error).__name__}: {error}"
        ) from error
    return compiled


class _Guarded:
    """Calls the compiled module; where its compiler fails, calls the eager one from then on.

    torch.compile compiles when it is first called, so only then does it fail. An error of the model's own passes
    through.
    """

    def __init__(self, eager: nn.Module, compiled: Callable[..., Any], result: Compiled) -> None:
        self._eager, self._call, self._result = eager, compiled, result
        self._proved = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._eager, name)  # a loss may call other methods of the model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A part of the model may have run before another part fails to compile: the batch must not count twice.
        before = None if self._proved else _Memory(self._eager)
        try:
            with backward_outside_autocast:  # the workaround of BACKWARD_UNDER_AUTOCAST
                output = self._call(*args, **kwargs)
        except compiler_error() as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            # Dynamo's first line names the backend, and the second what it raised.
            reason = " ".join(line.strip() for line in lines[:2])
            logger.warning("the model runs eagerly, the compiler failed: %s", reason)
            self._result.compiled, self._result.reason, self._result.module = False, reason, self._eager
            self._call, self._proved = self._eager, True
            if before is not None:
                before.restore()
            return self._eager(*args, **kwargs)
        self._proved = True
        return output


class _Memory:
    """What a forward pass changes beside its output: buffers, and the random generators of the model's devices."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        tensors = [*module.parameters(), *module.buffers()]
        modules = {tensor.device: torch.get_device_module(tensor.device) for tensor in tensors}
        self._generators = [
            (module, device, module.get_rng_state(device))
            for device, module in modules.items()
            if hasattr(module, "get_rng_state")  # the host has no generator of its own beside torch's
        ]
        self._host = torch.get_rng_state()

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for generator, device, state in self._generators:
            generator.set_rng_state(state, device)
        torch.set_rng_state(self._host)
