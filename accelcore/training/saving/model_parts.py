"""Parts of what the model is, under the names of its parameters: weights, fp32 masters, and which are trained.

They do not depend on the precision, the route that computes the updates, or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import CheckpointError, logger
from accelcore.optim.flat.memory import Slot
from accelcore.optim.shards import to_local
from accelcore.precision.policy import LOW_PRECISION
from accelcore.training.gradients import Gradients
from accelcore.training.plan import Plan
from accelcore.training.saving.parts import Part, Saved, as_dict, kind, malformed

_CONVERTIBLE = {torch.float32, *LOW_PRECISION}  # dtypes between which a restored model is converted


@dataclass(frozen=True)
class TrainedPart(Part):
    """Names of the trained parameters. The first step after a resume compares them: see `warn_if_others_trained`."""

    plan: Plan
    name = "trained"

    def shared_state(self) -> Any:
        return [slot.name for slot in self.plan.gradients.slots]

    def prepare(self, saved: Saved) -> Callable[[], object]:
        names = saved.shared.get(self.name)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise malformed(f"the checkpoint's list of trained parameters is {names!r}")
        differing = {name: name in names for name in {slot.name for slot in self.plan.gradients.slots} ^ set(names)}
        what = _other_trained(self.plan, differing)
        if what and saved.micro:
            raise CheckpointError(
                what,
                why="the checkpoint was saved within a window, whose gradients belong to the parameters trained then",
                remedy=f"{saved.between_windows()}. Or freeze or unfreeze as that run had, and call trainer.refresh() "
                "before the resume. To avoid this, save where trainer.window_closed is True",
            )
        return lambda: setattr(self.plan, "otherwise_trained", differing or None)


def warn_if_others_trained(plan: Plan) -> None:
    """Log that the first step after a resume trains other parameters than the run that saved the checkpoint.

    A parameter that was the same at the resume was changed since: the script may unfreeze it for an epoch that begins.
    """
    what = _other_trained(plan, plan.otherwise_trained or {})
    plan.otherwise_trained = None
    if what and plan.backend.collectives.rank == 0:
        logger.warning(
            "%s: the results will differ from the run that saved it. If that is not meant, freeze or unfreeze as "
            "that run had, by requires_grad_, and call trainer.refresh(). In a loop over epochs write `if epoch >= 1`, "
            "not `if epoch == 1`",
            what,
        )


def _other_trained(plan: Plan, saved: Mapping[str, bool]) -> str:
    """Return a text on the parameters that are trained and were not, or the reverse; `saved`: whether they were."""
    now = {slot.name for slot in plan.gradients.slots}
    differing = [name for name, was in saved.items() if was != (name in now)]
    if not differing:
        return ""
    name = min(differing)
    what = f"{name!r} is " + ("frozen now, and was trained" if saved[name] else "trained now, and was not")
    return f"{what} when the checkpoint was saved (parameters that differ: {len(differing)})"


class ModelPart(Part):
    """The model's `state_dict`. Low-precision parameters have the values of their fp32 masters.

    It has a file of its own, which any safetensors tool reads.
    """

    name = "model"

    def __init__(self, model: nn.Module, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients

    def shared_state(self) -> dict[str, Any]:
        return self.in_fp32[0]

    @cached_property  # for both parts: each save makes its parts
    def in_fp32(self) -> tuple[dict[str, Any], set[str]]:
        """The model's state_dict with masters instead of their parameters, and the names of these parameters.

        An entry that a module or hook has changed is not replaced by the master.
        """
        self._gradients.refresh(thorough=True)
        masters = {id(slot.parameter): slot for slot in _with_master(self._gradients)}
        state, replaced = dict(self._model.state_dict()), set()
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            slot, value = masters.get(id(parameter)), state.get(name)
            if slot is not None and _is_rounded_to(parameter, value):
                state[name] = slot.trained
                replaced.add(slot.name)
        return state, replaced

    def prepare(self, saved: Saved) -> Callable[[], object]:
        exact, have_masters = _saved_masters(saved), {id(slot.parameter) for slot in _with_master(self._gradients)}
        own, state = self._model.state_dict(), dict(saved.model)
        tensors: dict[str, Tensor] = dict(self._model.named_parameters(remove_duplicate=False))
        tensors |= dict(self._model.named_buffers(remove_duplicate=False))
        rounded = []
        for name, value in own.items():
            new = state.get(name)
            if _is_rounded_to(new, exact.get(name)):
                new = exact[name]
            if not isinstance(new, Tensor) or new.shape != value.shape or not {new.dtype, value.dtype} <= _CONVERTIBLE:
                continue
            state[name] = new.to(value.dtype)
            tensor, part = tensors.get(name, value), to_local(new)
            if id(tensor) not in have_masters and not torch.equal(part, part.to(tensor.dtype).to(part.dtype)):
                rounded.append(name)
        _check_names(own, state, saved)
        if rounded:
            text = "%d tensors of the checkpoint, such as %s, lose precision: the model has no fp32 masters for them"
            logger.warning(text, len(rounded), rounded[0])
        return lambda: self._model.load_state_dict(state)


class MastersPart(Part):
    """fp32 masters by parameter name, if their values are not in the model's part already.

    A checkpoint with masters also restores an fp32 model, and a checkpoint of an fp32 model restores masters. So a run
    can change its precision without losing any.
    """

    name = "masters"

    def __init__(self, model: ModelPart, gradients: Gradients) -> None:
        self._model, self._gradients = model, gradients

    def shared_state(self) -> dict[str, Tensor]:
        _, in_model = self._model.in_fp32
        return {slot.name: slot.trained for slot in _with_master(self._gradients) if slot.name not in in_model}

    def prepare(self, saved: Saved) -> Callable[[], object]:
        exact = {**saved.model, **_saved_masters(saved)}

        def commit() -> None:
            self._gradients.refresh()
            with torch.no_grad():
                for slot in _with_master(self._gradients):
                    is_exact = _is_rounded_to(slot.parameter, exact.get(slot.name))
                    slot.trained.copy_(exact[slot.name] if is_exact else slot.parameter)

        return commit


def _with_master(gradients: Gradients) -> list[Slot]:
    return [slot for slot in gradients.slots if slot.trained is not slot.parameter]


def _is_rounded_to(rounded: Any, value: Any) -> bool:
    """Check if `value`, cast to the dtype of `rounded`, equals it."""
    if not isinstance(rounded, Tensor) or not isinstance(value, Tensor) or value.shape != rounded.shape:
        return False
    rounded, value = to_local(rounded), to_local(value)
    return torch.equal(value.to(rounded), rounded)


def _saved_masters(saved: Saved) -> dict[str, Tensor]:
    masters = as_dict(saved.shared.get("masters"), "masters")
    for name, value in masters.items():
        of = saved.model.get(name)
        if not isinstance(of, Tensor) or not of.is_floating_point() or kind(value) != kind(of.float()):
            raise malformed(f"the checkpoint has a master of {name!r}, which does not fit that parameter")
    return masters


def _check_names(own: Mapping[str, Any], state: Mapping[str, Any], saved: Saved) -> None:
    problems = {
        "missing in the checkpoint": [name for name in own if name not in state],
        "unknown to the model": [name for name in state if name not in own],
        "of another shape or dtype": [
            f"{name} ({kind(own[name])} in the model, {kind(state[name])} in the checkpoint)"
            for name in own
            if name in state and kind(own[name]) != kind(state[name])
        ],
    }
    if any(problems.values()):
        raise CheckpointError(
            f"{saved.source} belongs to another model",
            why="\n       ".join(
                f"{len(names)} {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                for what, names in problems.items()
                if names
            ),
            remedy="build the model as it was when it was saved, or save and resume in another folder"
            if saved.path
            else "give the file of a model with these names and shapes, or build the model that it belongs to",
        )
