"""The model's part of a checkpoint: its state_dict, and fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accelcore.errors import CheckpointError
from accelcore.training.gradients import Gradients
from accelcore.training.parts.part import Change, Saved, kind, table

__all__ = ["MastersPart", "ModelPart"]


class MastersPart:
    """fp32 masters, by the names of their parameters.

    A checkpoint with masters also restores an fp32 model, and one of an fp32 model restores masters: a run moves
    between precisions without losing any.
    """

    name = "masters"
    scope: Literal["shared"] = "shared"

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients

    def state(self) -> dict[str, Tensor]:
        self._gradients.follow()
        return {slot.name: slot.trained for slot in self._gradients.slots if slot.trained is not slot.parameter}

    def prepare(self, saved: Saved) -> Change:
        exact = _exact(saved)
        pairs = [(master, exact[name]) for name, master in self.state().items() if name in exact]

        def commit() -> None:
            with torch.no_grad():
                for master, value in pairs:
                    master.copy_(value)
            self._gradients.note()

        return Change(commit)


class ModelPart:
    """The model's `state_dict`. It is a file of its own, which any tool for safetensors reads."""

    name = "model"
    scope: Literal["shared"] = "shared"

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients

    def state(self) -> dict[str, Any]:
        return self._model.state_dict()

    def prepare(self, saved: Saved) -> Change:
        trained = {slot.name: slot for slot in self._gradients.slots}
        has_masters = {name for name, slot in trained.items() if slot.trained is not slot.parameter}
        exact = _exact(saved)
        state = dict(saved.model)
        for name, own in self.state().items():
            # Precision may change where the fp32 value is known on either side.
            changes = isinstance(own, Tensor) and name in exact and exact[name].dtype == torch.float32
            if changes and (own.dtype == torch.float32 or name in has_masters) and exact[name].shape == own.shape:
                state[name] = exact[name].to(own.dtype)
        _check(self.state(), state)
        # What modules and hooks of others do with it may raise: there has to be a way back.
        before = {name: _on_host(value) for name, value in self.state().items()}

        def commit() -> None:
            self._model.load_state_dict(state)

        def undo() -> None:
            with torch.no_grad():  # past hooks, which would refuse again
                for name, own in self.state().items():
                    if isinstance(own, Tensor):
                        own.copy_(before[name])
            if not all(isinstance(value, Tensor) for value in before.values()):
                self._model.load_state_dict(before)
            self._gradients.note()

        return Change(commit, undo)


def _exact(saved: Saved) -> dict[str, Tensor]:
    """The most precise value of each parameter that a checkpoint has."""
    masters = table(saved.shared.get("masters", {}), "masters")
    model = {name: value for name, value in saved.model.items() if isinstance(value, Tensor)}
    if strange := [name for name in masters if name not in model or masters[name].shape != model[name].shape]:
        raise CheckpointError(f"the checkpoint has a master of {strange[0]!r}, which is no such parameter of its model")
    return {**model, **masters}


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


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
