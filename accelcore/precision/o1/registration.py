"""Registered functions: under O1 they run in low precision, in fp32, or in the widest dtype of their inputs.

A registration takes precedence over the table: inside such a function autocast is off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from accelcore.errors import ConfigurationError, did_you_mean
from accelcore.precision.o1.autocast import castable_tensors, is_o1_active, with_casts
from accelcore.precision.o1.table import Treatment

F = TypeVar("F", bound=Callable[..., Any])

_ABSENT = object()
_registered: dict[tuple[int, str], tuple[Any, object, Callable[..., Any]]] = {}
"""By the module's id and the function's name: the module, its own entry before, and the wrapper in its place."""


def _register(module: Any, name: str, treatment: Treatment) -> None:
    found, key = getattr(module, name, _ABSENT), (id(module), name)
    if not callable(found):
        names = [name for name in dir(module) if callable(getattr(module, name, None))]
        raise ConfigurationError(
            f"{getattr(module, '__name__', module)!s} has no function {name!r}",
            remedy=did_you_mean(name, names, "give the name of a function, such as 'softmax'"),
        )
    if key in _registered:
        raise ConfigurationError(f"{name!r} is registered already", remedy="call accelcore.precision.reset() first")
    treated = _treated(found, treatment)

    @wraps(found)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return (treated if key in _registered else found)(*arguments, **options)

    _registered[key] = module, vars(module).get(name, _ABSENT), wrapper  # a class may only have inherited it
    setattr(module, name, wrapper)


def register_half_function(module: Any, name: str) -> None:
    """Make a function run in autocast's dtype under O1, until `accelcore.precision.reset()`. The name is apex's.

    A wrapper replaces the function. It does nothing outside of O1, or after `reset`.

    Args:
        module: a module, or a class such as `torch.Tensor`.
        name: the name of its function.

    Raises:
        ConfigurationError: there is no such function, or it is registered already. It is a ValueError, too.
    """
    _register(module, name, Treatment.LOW)


def register_float_function(module: Any, name: str) -> None:
    """Make a function run in fp32 under O1; otherwise like `register_half_function`."""
    _register(module, name, Treatment.FP32)


def register_promote_function(module: Any, name: str) -> None:
    """Make a function run in the widest dtype of its inputs under O1; otherwise like `register_half_function`."""
    _register(module, name, Treatment.WIDEST)


def half_function(function: F) -> F:
    """Decorate a function to run in autocast's dtype under O1."""
    return _treated(function, Treatment.LOW)


def float_function(function: F) -> F:
    """Decorate a function to run in fp32 under O1."""
    return _treated(function, Treatment.FP32)


def promote_function(function: F) -> F:
    """Decorate a function to run in the widest dtype of its inputs under O1."""
    return _treated(function, Treatment.WIDEST)


def remove_all() -> None:
    """Restore every registered function, except one that somebody else has wrapped or replaced since."""
    while _registered:
        (_, name), (module, before, wrapper) = _registered.popitem()
        if vars(module).get(name) is wrapper and before is _ABSENT:
            delattr(module, name)
        elif vars(module).get(name) is wrapper:
            setattr(module, name, before)


def _treated(function: F, treatment: Treatment) -> F:
    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        tensors = list(castable_tensors((*arguments, *options.values()))) if is_o1_active() else []
        kinds = {tensor.device.type for tensor in tensors}
        device_type = next((kind for kind in kinds if torch.is_autocast_enabled(kind)), None)
        if device_type is None:
            return function(*arguments, **options)
        with torch.autocast(device_type, enabled=False):
            return with_casts(function, treatment, arguments, options, device_type, tensors)

    return call  # type: ignore[return-value]
