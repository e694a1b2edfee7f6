"""What one of torch's optimizers keeps for a parameter: found by a first step of its class on a small one.

It is not written down here for each class, because it depends on options, and on the version of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import CheckpointError
from accelcore.optim.route import name_of
from accelcore.optim.slot_state import SWITCHES

__all__ = ["Kept", "Shapes", "check_shapes"]

Shapes = Mapping[str, tuple[int, ...] | None]
"""By its key, the shape of each tensor in a parameter's state; None where the parameter's does not tell it."""

_SIZES = (2, 3, 5, 7, 11, 13)
"""Of the small parameter: by its size in the state, a dimension of the parameter is known again."""


class Kept:
    """What an optimizer of this class keeps for the parameters of a group with these options.

    Nothing is known of a class that is not torch's, or whose step takes more than dense gradients.
    """

    def __init__(self, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
        self._kind = kind
        chosen = inspect.signature(kind).parameters.keys() - {"params", *SWITCHES}
        self._options = {key: value for key, value in options.items() if key in chosen}
        self._small: dict[tuple[int, bool], Mapping[str, torch.Size]] = {}

    def shapes(self, parameter: Tensor) -> Shapes:
        """Of what it keeps for this parameter."""
        if name_of(self._kind) is None or parameter.dim() > len(_SIZES):
            return {}
        sizes, key = _SIZES[: parameter.dim()], (parameter.dim(), parameter.is_complex())
        if key not in self._small:
            dtype = torch.complex64 if parameter.is_complex() else torch.float32
            self._small[key] = self._first_step(torch.zeros(sizes, dtype=dtype, device="cpu"))
        dimensions = {1: 1, **dict(zip(sizes, parameter.shape, strict=True))}
        return {
            key: tuple(dimensions[size] for size in shape) if all(size in dimensions for size in shape) else None
            for key, shape in self._small[key].items()
        }

    def _first_step(self, small: Tensor) -> Mapping[str, torch.Size]:
        small.grad = torch.zeros_like(small)
        try:
            optimizer = self._kind([small], **self._options)
            with torch.no_grad():
                inspect.unwrap(self._kind.step)(optimizer)  # past the hooks of the process: it is none of theirs
        except Exception:  # noqa: BLE001  # it needs a closure, sparse gradients, a matrix: then nothing is known
            return {}
        return {key: value.shape for key, value in optimizer.state[small].items() if isinstance(value, Tensor)}


def check_shapes(name: str, entry: Mapping[str, Any], parameter: Tensor, shapes: Shapes) -> None:
    """Refuse a state that has not what an optimizer goes on from.

    Args:
        name: of the parameter.
        entry: its state; one that is empty begins anew.
        shapes: of what it has to have. A scalar may be a number.

    Raises:
        CheckpointError: something is missing, no tensor, or of another shape or kind of number.
    """
    if missing := sorted(shapes.keys() - entry.keys()) if entry else []:
        raise CheckpointError(f"the checkpoint's state of {name!r} lacks {', '.join(missing)}")
    for key in shapes.keys() & entry.keys():
        value, shape = entry[key], shapes[key]
        if shape == ():
            fits = isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)
        else:
            fits = isinstance(value, Tensor) and shape in (None, value.shape) and _alike(value, parameter)
        if not fits:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise CheckpointError(
                f"the checkpoint's {key} of {name!r} is {found}, and its parameter has shape {tuple(parameter.shape)}"
            )


def _alike(value: Tensor, parameter: Tensor) -> bool:
    """Whether both are real numbers, or both complex."""
    return value.is_complex() if parameter.is_complex() else value.is_floating_point()
