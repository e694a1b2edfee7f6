"""Find the models and optimizers of a training that were not named, by torch's hooks on all modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accelcore.errors import ConfigurationError
from accelcore.parity.collector import Collector
from accelcore.util.containers import tensors

__all__ = ["Finder"]


class Finder(ExitStack):
    """Watch each model at its first call with gradients, and report each optimizer before its updates, until `close`.

    The hook on all modules does not show keyword arguments. Modules that get a part from now on have a hook of their
    own, which does.
    """

    def __init__(self, collector: Collector, updating: Callable[[Optimizer], None]) -> None:
        super().__init__()
        self._collector = collector
        self._made: WeakSet[nn.Module] = WeakSet()
        for handle in (
            register_module_module_registration_hook(self._made_by),
            register_module_parameter_registration_hook(self._made_by),
            register_module_forward_pre_hook(self._before_any_call),
            register_optimizer_step_pre_hook(lambda optimizer, *_: updating(optimizer)),
        ):
            self.callback(handle.remove)

    def _made_by(self, module: nn.Module, name: str, part: Any) -> None:
        if module not in self._made and not isinstance(module, torch.jit.ScriptModule):
            self._made.add(module)
            self.callback(module.register_forward_pre_hook(self._before_call(), with_kwargs=True).remove)

    def _before_call(self) -> Callable[..., tuple[Any, Any] | None]:
        def before_call(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
            return self._watch(module, arguments, options) if self._is_new(module) else None

        return before_call  # a function, which a copy of the module shares

    def _before_any_call(self, module: nn.Module, arguments: Any) -> Any:
        if not self._is_new(module) or module in self._made:
            return None
        if not tensors(arguments):
            raise ConfigurationError(
                f"{type(module).__name__} was made before the context, and is first called without a positional tensor",
                why="torch's hooks on all modules do not show keyword arguments",
                remedy="make the model within the context, or give model= and optimizer=",
            )
        taken = self._watch(module, arguments, {})
        return None if taken is None else taken[0]

    def _is_new(self, module: nn.Module) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._collector.knows(module):
            return False
        return any(parameter.requires_grad for parameter in module.parameters())

    def _watch(self, module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """Watch a model, and return the arguments to call it with; None for its own."""
        watched = self._collector.watch(module)
        if watched.model is not module and not watched.compiled:
            return None  # a wrapper, which calls the model next
        return self._collector.enter(watched, module, arguments, options)  # its own hook is called from now on
