"""What a trainer was given in place of what it needs: told when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError
from accelcore.wording import kind_of

__all__ = ["check_arguments"]


def check_arguments(model: Any, optimizer: Any, loss: Any) -> None:
    """Raise ConfigurationError for a first argument that is no model, a second that is no optimizer, a wrong loss."""
    if isinstance(model, list | tuple | Mapping) and not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"a trainer trains one model, and was given {kind_of(model)} of {len(model)}",
            remedy="make a trainer for each, with an optimizer of its own; or one nn.Module that holds them, such as "
            "nn.ModuleList, where one loss trains all",
        )
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"the model is {_shown(model)}, not an nn.Module", remedy=_order(optimizer, model))
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"the optimizer is {_shown(optimizer)}, not an optimizer", remedy=_made(optimizer))
    if loss is not None and (not callable(loss) or _is_torchs(loss)):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ConfigurationError(
            f"loss={name} does not take a model and a batch",
            why="the trainer calls loss(model, batch), with the model that is prepared for this device",
            remedy="say loss=lambda model, batch: criterion(model(batch[0]), batch[1])",
        )


def _order(optimizer: Any, model: Any) -> str:
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        return "give the model first: accel.trainer(model, optimizer)"
    return "make it first" if isinstance(model, type) else "give the module whose parameters the optimizer has"


def _made(optimizer: Any) -> str:
    if isinstance(optimizer, list | tuple):
        return "make one optimizer of several parameter groups, or a trainer for each model with its own"
    name = optimizer if isinstance(optimizer, str) else "adamw"
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return f"make it: {optimizer.__name__}(model.parameters(), lr=...)"
    return f'make it: accel.optimizers.create("{name}", model.parameters(), lr=...)'


def _is_torchs(loss: Any) -> bool:
    """Whether this is one of torch's losses, a class of them, or a function: they take what a model has computed."""
    home = loss if inspect.isclass(loss) or inspect.isroutine(loss) else type(loss)
    return str(getattr(home, "__module__", "")).partition(".")[0] == "torch"


def _shown(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else kind_of(value)
