"""Choose parts of a model: by type, by a function, or its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from accelcore.errors import ConfigurationError

__all__ = ["Parts", "check_parts", "chosen"]

Parts = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
"""Modules of one or several types, or those for which a function returns True."""


def check_parts(parts: object, option: str) -> None:
    """Raise ConfigurationError if the value of an option cannot choose modules."""
    kinds = parts if isinstance(parts, tuple) else (parts,)
    are_types = bool(kinds) and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
    is_function = callable(parts) and not isinstance(parts, type)
    if not (are_types or is_function):
        raise ConfigurationError(
            f"{option}={parts!r} does not choose modules",
            available="a type of module, a tuple of types, a function of a module that returns True or False",
        )


def chosen(model: nn.Module, parts: Parts | None, option: str) -> list[nn.Module]:
    """Return the chosen parts of a model, outer ones first, without the model itself; None chooses its blocks.

    Raises:
        ConfigurationError: no part of the model is chosen.
    """
    if parts is None:
        return list(_blocks(model))
    found = [module for module in model.modules() if module is not model and _fits(parts, module)]
    if not found:
        raise ConfigurationError(
            f"{option}={parts!r} chooses no part of this model",
            available=", ".join(sorted({type(module).__name__ for module in model.modules() if module is not model})),
        )
    return found


def _fits(parts: Parts, module: nn.Module) -> bool:
    return isinstance(module, parts) if isinstance(parts, type | tuple) else bool(parts(module))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost ModuleLists. A list itself is never called, so it cannot be a block."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _blocks(child)
