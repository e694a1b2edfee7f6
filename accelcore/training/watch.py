"""Noticing that a model, or what of it is trained, is no longer what its trainer was made for."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from accelcore.errors import TrainingError

__all__ = ["Watch"]

_registrations = [0]
# Looked at in every window, of every parameter: without a frame of Python's for each.
_TRAINABLE, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")


def _note(module: nn.Module, name: str, what: object) -> None:
    _registrations[0] += 1


# torch's own hooks, of the whole process: all they do is count that some module somewhere was given a part.
register_module_module_registration_hook(_note)
register_module_parameter_registration_hook(_note)


class Watch:
    """What is trained, as it was when this was made.

    Args:
        model, optimizer: as the trainer has prepared them.
        rest: sees that the model has the parameters that are trained, and nothing gathered of them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rest: Callable[[], None] = lambda: None) -> None:
        self._model, self._optimizer, self._rest = model, optimizer, rest
        self._registrations = _registrations[0]
        self._members = _members(optimizer)
        self._held = _held(optimizer)
        self._of_model = dict(model.named_parameters())
        self._parameters = list(self._of_model.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, added to the optimizer, or laid out in another way since.

        Kernels walk through a parameter and its state side by side, and count on the same strides.

        Raises:
            TrainingError: parameters of the model were replaced, cast, or new ones are in it that nobody trains.
        """
        if self._registrations != _registrations[0]:
            self.check()
            self._registrations = _registrations[0]
        addresses = list(map(Tensor.data_ptr, self._parameters))
        moved = addresses != self._addresses
        if moved:  # a cast or other strides come with other memory
            self._check_dtypes()
            self._addresses = addresses
        return (
            list(map(_TRAINABLE, self._parameters)) != self._trainable
            or (moved and list(map(Tensor.stride, self._parameters)) != self._strides)
            or _members(self._optimizer) != self._members
        )

    def _check_dtypes(self) -> None:
        if list(map(_DTYPE, self._parameters)) != self._dtypes:
            raise TrainingError(
                "the model was cast after its trainer was made",
                why="the optimizer's state, and what ranks exchange, are of the dtypes it had",
                remedy="cast it before, or say precision=Policy(model_dtype=...); or make optimizer and trainer anew",
            )

    def check(self) -> None:
        """Raise TrainingError where the model's parameters are not those that its trainer was made for."""
        self._rest()
        now = dict(self._model.named_parameters())
        gone = [name for name, parameter in self._of_model.items() if now.get(name) is not parameter]
        held = _held(self._optimizer)
        known = held | set(map(id, self._of_model.values()))
        strange = [name for name, parameter in now.items() if id(parameter) not in known and parameter.requires_grad]
        if held - self._held - set(map(id, now.values())):
            raise TrainingError(
                "parameters were put into the optimizer that are not in the model",
                why="they would be neither moved to the device, nor reduced over ranks, nor saved",
                remedy="make what else is trained a submodule of the model; fp32 masters are the trainer's to make: "
                'precision=Policy(model_dtype="bfloat16")',
            )
        if gone or strange:
            what = (
                f"{gone[0]!r} is gone or another one" if gone else f"{strange[0]!r} is new, and in no parameter group"
            )
            raise TrainingError(
                f"the model's parameters have changed since its trainer was made: {what}",
                why="the optimizer would go on with those it has, and nobody would train the others",
                remedy="make the optimizer and the trainer anew; a parameter that was only added can be trained by "
                "optimizer.add_param_group, one that is not to be trained by requires_grad_(False)",
            )


def _members(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _held(optimizer: Optimizer) -> set[int]:
    return {id(held) for group in optimizer.param_groups for held in group["params"]}
