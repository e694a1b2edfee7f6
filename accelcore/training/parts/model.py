"""The model's part of a checkpoint: its state_dict, and fp32 masters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accelcore.errors import CheckpointError
from accelcore.optim.runs import Slot
from accelcore.optim.shards import shard
from accelcore.precision.table import LOW_PRECISION
from accelcore.training.gradients import Gradients
from accelcore.training.parts.part import Change, Saved, kind, table
from accelcore.training.parts.put_back import copied, put_back

__all__ = ["MastersPart", "ModelPart"]

logger = logging.getLogger("accelcore")

_ALIKE = {torch.float32, *LOW_PRECISION}
"""Dtypes that a run may change between."""


class MastersPart:
    """fp32 masters, by the names of their parameters, as far as the model's part does not have their values.

    A checkpoint with masters also restores an fp32 model, and one of an fp32 model restores masters: a run moves
    between precisions without losing any.
    """

    name = "masters"
    scope: Literal["shared"] = "shared"

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients

    def state(self) -> dict[str, Tensor]:
        _, told = _in_fp32(self._model, self._gradients)
        return {slot.name: slot.trained for slot in _with_master(self._gradients) if slot.name not in told}

    def prepare(self, saved: Saved) -> Change:
        exact = {**saved.model, **_saved_masters(saved)}

        def commit() -> None:
            self._gradients.refresh()
            with torch.no_grad():
                for slot in _with_master(self._gradients):
                    value = exact.get(slot.name)
                    if value is None or not _is_rounded_to(slot.parameter, value):
                        value = slot.parameter
                    slot.trained.copy_(value)

        return Change(commit)


class ModelPart:
    """The model's `state_dict`, with the values of fp32 masters where there are any.

    It is a file of its own, which any tool for safetensors reads.
    """

    name = "model"
    scope: Literal["shared"] = "shared"

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients

    def state(self) -> dict[str, Any]:
        return _in_fp32(self._model, self._gradients)[0]

    def prepare(self, saved: Saved) -> Change:
        self._gradients.refresh()  # masters take over what the script wrote: `undo` says that they have
        exact, have_masters = _saved_masters(saved), {id(slot.parameter) for slot in _with_master(self._gradients)}
        own, state = self._model.state_dict(), dict(saved.model)
        held = dict(_tensors(self._model))
        rounded = []
        for name, value in own.items():
            told = state.get(name)
            if _is_rounded_to(told, exact.get(name)):
                told = exact[name]
            if not isinstance(told, Tensor) or told.shape != value.shape or not {told.dtype, value.dtype} <= _ALIKE:
                continue
            state[name] = told.to(value.dtype)
            tensor, part = held.get(name, value), shard(told)
            if id(tensor) not in have_masters and not torch.equal(part, part.to(tensor.dtype).to(part.dtype)):
                rounded.append(name)
        _check(own, state)
        if rounded:
            logger.warning(
                "%d tensors of the checkpoint, such as %s, are rounded: here they have no fp32 masters",
                len(rounded),
                rounded[0],
            )
        # What modules and hooks of others do with it may raise: there has to be a way back.
        before = {name: shard(value).detach().to("cpu", copy=True) for name, value in held.items()}
        others = copied(_beside(held, own))

        def commit() -> None:
            self._model.load_state_dict(state)

        def undo() -> None:
            try:
                if others:
                    put_back(
                        lambda state: self._model.load_state_dict({**own, **state}),
                        others,
                        lambda: _beside(held, self._model.state_dict()),
                    )
            finally:
                with torch.no_grad():  # past hooks, which would refuse again
                    for name, tensor in held.items():
                        shard(tensor).copy_(before[name])

        return Change(commit, undo)


def _with_master(gradients: Gradients) -> list[Slot]:
    return [slot for slot in gradients.slots if slot.trained is not slot.parameter]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all names that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _beside(held: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state_dict has beside parameters and buffers, such as the extra state of modules."""
    return {name: value for name, value in state.items() if name not in held}


def _in_fp32(model: nn.Module, gradients: Gradients) -> tuple[dict[str, Any], set[str]]:
    """The model's state_dict with masters in place of what they are rounded to, and of which parameters those are.

    A module or hook may have changed what it says of a parameter; its master is then not what it says.
    """
    gradients.refresh()
    masters = {id(slot.parameter): slot for slot in _with_master(gradients)}
    state, told = dict(model.state_dict()), set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        slot, value = masters.get(id(parameter)), state.get(name)
        if slot is not None and _is_rounded_to(parameter, value):
            state[name] = slot.trained
            told.add(slot.name)
    return state, told


def _is_rounded_to(rounded: Any, value: Any) -> bool:
    """Whether a value, in the dtype of another tensor, is that tensor."""
    if not isinstance(rounded, Tensor) or not isinstance(value, Tensor) or value.shape != rounded.shape:
        return False
    rounded, value = shard(rounded), shard(value)  # of shards, this rank's
    return torch.equal(value.to(rounded), rounded)


def _saved_masters(saved: Saved) -> dict[str, Tensor]:
    masters = table(saved.shared.get("masters", {}), "masters")
    strange = [name for name, value in masters.items() if kind(value) != _kind_of_master(saved.model.get(name))]
    if strange:
        raise CheckpointError(f"the checkpoint has a master of {strange[0]!r}, which is no such parameter of its model")
    return masters


def _kind_of_master(value: Any) -> str:
    return kind(value.float()) if isinstance(value, Tensor) and value.is_floating_point() else "none"


def _check(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    problems = [f"{name} is missing in the checkpoint" for name in own.keys() - saved.keys()]
    problems += [f"{name} is unknown to the model" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        if kind(own[name]) != kind(saved[name]):
            problems.append(f"{name} is {kind(own[name])} in the model and {kind(saved[name])} in the checkpoint")
    if problems:
        shown = "; ".join(sorted(problems)[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise CheckpointError(
            "the checkpoint is of another model", why=shown, remedy="build the model as it was when it was saved"
        )
