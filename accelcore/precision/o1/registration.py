"""Registered functions: under O1 they run in low precision, in fp32, or in the widest dtype of their inputs.

A registration takes precedence over the table: inside such a function autocast is off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, final

import torch

from accelcore.errors import ConfigurationError
from accelcore.precision.o1.autocast import castable_tensors, is_o1_active, with_casts
from accelcore.precision.o1.table import Treatment
from accelcore.util.text import did_you_mean

__all__ = [
    "Registration",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "remove_all",
]

F = TypeVar("F", bound=Callable[..., Any])

_ABSENT = object()
_registrations: list[Registration] = []


@final
class Registration:
    """Registered function, until `remove()`, the end of a `with`, or `accelcore.precision.reset()`.

    A wrapper replaces the function. It does nothing outside of O1, or after it was removed.
    """

    def __init__(self, module: Any, name: str, treatment: Treatment) -> None:
        found = getattr(module, name, _ABSENT)
        if not callable(found):
            names = [name for name in dir(module) if callable(getattr(module, name, None))]
            raise ConfigurationError(
                f"{getattr(module, '__name__', module)!s} has no function {name!r}",
                remedy=did_you_mean(name, names, "give the name of a function, such as 'softmax'"),
            )
        self._module, self._name, self._active = module, name, True
        treated = _treated(found, treatment)

        @wraps(found)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            return (treated if self._active else found)(*arguments, **options)

        if any(other._module is module and other._name == name for other in _registrations):
            raise ConfigurationError(f"{name!r} is registered already", remedy="remove that registration first")
        self._before = vars(module).get(name, _ABSENT)  # a class may only have inherited it
        self._wrapper = wrapper
        setattr(module, name, wrapper)
        _registrations.append(self)

    def remove(self) -> None:
        """Restore the function. Later calls do nothing."""
        if self._active:
            self._active = False
            _registrations.remove(self)
            if vars(self._module).get(self._name) is not self._wrapper:
                return  # somebody else's wrapper is around it
            if self._before is _ABSENT:
                delattr(self._module, self._name)
            else:
                setattr(self._module, self._name, self._before)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def register_half_function(module: Any, name: str) -> Registration:
    """Make a function run in autocast's dtype under O1. The name is apex's.

    Args:
        module: a module, or a class such as `torch.Tensor`.
        name: the name of its function.

    Raises:
        ConfigurationError: there is no such function, or it is registered already. It is a ValueError, too.
    """
    return Registration(module, name, Treatment.LOW)


def register_float_function(module: Any, name: str) -> Registration:
    """Make a function run in fp32 under O1; otherwise like `register_half_function`."""
    return Registration(module, name, Treatment.FP32)


def register_promote_function(module: Any, name: str) -> Registration:
    """Make a function run in the widest dtype of its inputs under O1; otherwise like `register_half_function`."""
    return Registration(module, name, Treatment.WIDEST)


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
    """Remove every registration."""
    for registration in list(_registrations):
        registration.remove()


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
