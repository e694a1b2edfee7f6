"""Find the models and optimizers of a training that were not named, by torch's hooks on all modules and optimizers."""

from __future__ import annotations

from collections.abc import Callable
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
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors


class Finder(Hooks):
    """Watch each model at its first call with gradients, and report each optimizer before its updates, until `close`.

    The hook on all modules does not show keyword arguments. Modules that get a part from now on have a hook of their
    own, which does.
    """

    def __init__(self, collector: Collector, updating: Callable[[Optimizer], None]) -> None:
        super().__init__()
        self._collector = collector
        self._made: WeakSet[nn.Module] = WeakSet()
        self.add(
            register_module_module_registration_hook(self._made_by),
            register_module_parameter_registration_hook(self._made_by),
            register_module_forward_pre_hook(self._before_any_call),
            register_optimizer_step_pre_hook(lambda optimizer, *_: updating(optimizer)),
        )

    def _made_by(self, module: nn.Module, name: str, part: Any) -> None:
        def before_call(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
            return self._watch(module, arguments, options)  # a function, which a copy of the module shares

        if module not in self._made and not isinstance(module, torch.jit.ScriptModule):
            self._made.add(module)
            self.add(module.register_forward_pre_hook(before_call, with_kwargs=True))

    def _before_any_call(self, module: nn.Module, arguments: Any) -> Any:
        if torch.compiler.is_compiling() or module in self._made:
            return None
        taken = self._watch(module, arguments, None)
        return None if taken is None else taken[0]

    def _watch(self, module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """Watch a model that is new, and return the arguments to call it with; None for its own."""
        known = self._collector.known
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or module in known:
            return None
        if any(part in known for part in module.modules()):  # a wrapper of a trainer's model, as of DDP
            known.add(module)
            return None
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return None
        if options is None and not tensors(arguments):
            raise ConfigurationError(
                f"{type(module).__name__} was made before the context, and is first called without a positional tensor",
                why="torch's hooks on all modules do not show keyword arguments",
                remedy="make the model within the context, or give model= and optimizer=",
            )
        watched = self._collector.watch(module)
        if watched.model is not module and not watched.compiled:
            return None  # a wrapper, which calls the model next
        name = None if watched.compiled else watched.full()
        return self._collector.enter(watched, module, name, (arguments, options or {}))  # its own hooks, from now on
