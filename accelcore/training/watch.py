"""Noticing that a model, or what of it is trained, is no longer what its trainer was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from operator import attrgetter, is_
from typing import Any

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
_NAMED = 3
"""How many changes a message names."""


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
        self._groups = list(optimizer.param_groups)
        self._members = [list(group["params"]) for group in self._groups]
        self._held = _held(optimizer)
        self._grown = False
        self._of_model = dict(model.named_parameters())
        self._parameters = list(self._of_model.values())
        self._trainable = list(map(_TRAINABLE, self._parameters))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._dtypes, self._strides = list(map(_DTYPE, self._parameters)), list(map(Tensor.stride, self._parameters))

    def changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, put into the optimizer or taken out, or laid out anew since.

        Kernels walk through a parameter and its state side by side, and count on the same strides. A frozen parameter
        that is new in the model counts, too: it has to be moved to the device, and to be the same on all ranks.

        Raises:
            TrainingError: parameters of the model were replaced, cast, or new ones are in it that nobody trains.
        """
        if self._registrations != _registrations[0]:
            self.check()
            self._registrations = _registrations[0]
            self._grown = any(name not in self._of_model for name, _ in self._model.named_parameters())
        addresses = list(map(Tensor.data_ptr, self._parameters))
        if addresses != self._addresses:  # a cast or other strides come with other memory
            self._check_dtypes()
            if self._laid_out_anew():
                return True
            self._addresses = addresses
        if self._grown or list(map(_TRAINABLE, self._parameters)) != self._trainable:
            return True
        groups = self._optimizer.param_groups
        if len(groups) != len(self._members):
            return True
        for group, members in zip(groups, self._members):  # noqa: B905  # as many, and `strict` takes time
            now = group["params"]
            if len(now) != len(members) or not all(map(is_, now, members)):
                return True
        return False

    def _laid_out_anew(self) -> bool:
        """Whether a parameter has other strides than it had."""
        return list(map(Tensor.stride, self._parameters)) != self._strides

    def check_layout(self) -> None:
        """Raise TrainingError where a parameter was laid out anew within a window."""
        if self._laid_out_anew():
            raise TrainingError(
                "parameters were given another memory layout within a window",
                why="their gradients lie as the parameters did",
                remedy="call trainer.flush() before, or do it when the window is full",
            )

    def changes(self) -> str:
        """What has changed, in words."""
        now = dict(self._model.named_parameters())
        was = zip(self._of_model.items(), self._trainable, self._strides, strict=True)
        said = []
        for (name, parameter), trainable, strides in was:
            if parameter.requires_grad != trainable:
                said.append(f"{name!r} was {'frozen' if trainable else 'unfrozen'}")
            if parameter.stride() != strides:
                said.append(f"{name!r} was laid out anew")
        said += [f"{name!r} is new" for name in now if name not in self._of_model]
        groups = zip_longest(self._optimizer.param_groups, self._members)
        for number, (group, members) in enumerate(groups):
            if group is None or members is None:
                said.append(f"group {number} of the optimizer was {'removed' if group is None else 'added'}")
            elif list(map(id, group["params"])) != list(map(id, members)):
                said.append(f"group {number} of the optimizer has other parameters")
        more = len(said) - _NAMED
        return ", ".join([*said[:_NAMED], *([f"and {more} more"] if more > 0 else [])])

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Let the optimizer have the parameters that it had, and no gradient of one that was not trained."""
        trained = {id(parameter) for parameter, was in zip(self._parameters, self._trainable, strict=True) if was}
        for parameter in chain(self._parameters, self._model.parameters()):
            if id(parameter) not in trained:
                parameter.grad = None
        groups = self._optimizer.param_groups
        now = [(group, group["params"]) for group in groups]
        _set_groups(groups, [(group, list(ones)) for group, ones in zip(self._groups, self._members, strict=True)])
        try:
            yield
        finally:
            _set_groups(groups, now)

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


def _set_groups(groups: list[dict[str, Any]], wanted: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> None:
    groups[:] = [group for group, _ in wanted]
    for group, members in wanted:
        group["params"] = members


def _held(optimizer: Optimizer) -> set[int]:
    return {id(held) for group in optimizer.param_groups for held in group["params"]}
