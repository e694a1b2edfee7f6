"""Parts of what is trained, under the names of the parameters: model, fp32 masters, optimizer, and which are trained.

They do not depend on the precision, the route that computes the updates, or the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer

from accelcore.errors import CheckpointError, logger
from accelcore.optim.binding import SWITCHES
from accelcore.optim.engine import name_of
from accelcore.optim.flat.memory import Slot
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.shards import to_local
from accelcore.precision.policy import LOW_PRECISION
from accelcore.training.gradients import Gradients
from accelcore.training.parallel.strategy import Strategy, owns
from accelcore.training.plan import Plan
from accelcore.training.saving.parts import Part, Saved, alike, as_dict, check_count, check_tensors, kind, malformed

_CONVERTIBLE = {torch.float32, *LOW_PRECISION}  # dtypes between which a restored model is converted
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Entries that torch's schedulers write into the groups of their optimizer."""
_OTHER_SHAPES = (Adafactor, LBFGS)  # classes of torch whose state has other shapes than the parameters


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
            "%s: the results differ from those of the run that saved it. If that is not meant, freeze or unfreeze as "
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


class OptimizerPart(Part):
    """Groups and state of an optimizer, under the names of its parameters.

    They can be restored by another route of the registry, by torch's class, and on another device. If the strategy
    divides the updates among the ranks, each rank has and saves the state of the parameters that it updates.

    `is_scheduled`: whether a scheduler changes options such as the learning rate.
    """

    name = "optimizer"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        gradients: Gradients,
        strategy: Strategy,
        *,
        is_scheduled: bool,
    ) -> None:
        self._optimizer, self._strategy, self._is_scheduled = optimizer, strategy, is_scheduled
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names.update({id(slot.trained): slot.name for slot in gradients.slots})

    def shared_state(self) -> dict[str, Any]:
        groups = []
        for group, live in zip(self._state_dict["param_groups"], self._optimizer.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in SWITCHES}
            options["lr"] = float(options["lr"])  # a tensor if steps are captured
            groups.append({**options, "params": self._members(live)})
        divided = self._strategy.owners is not None
        return {"kind": self._kind(), "groups": groups} | ({} if divided else {"state": self._entries()})

    def own_state(self) -> dict[str, Any] | None:
        return None if self._strategy.owners is None else {"state": self._entries()}

    @cached_property
    def _state_dict(self) -> dict[str, Any]:  # the same for `shared_state` and `own_state`: each save makes its parts
        return self._optimizer.state_dict()

    def _entries(self) -> dict[str, Any]:
        """Return the state of each parameter that this rank updates, by name."""
        state = self._state_dict
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        names = chain.from_iterable(map(self._members, self._optimizer.param_groups))
        held = ((name, state["state"].get(number)) for number, name in zip(numbers, names, strict=True))
        return {name: entry for name, entry in held if entry and owns(self._strategy, name)}

    def prepare(self, saved: Saved) -> Callable[[], object]:
        tree = as_dict(saved.shared.get("optimizer"), "optimizer state", "groups", "state")
        if tree.get("kind", self._kind()) != self._kind():  # another program's file has no kind
            raise _another(saved, f"it is {tree['kind']!r}, and this one is {self._kind()!r}")
        groups, numbers = self._groups(tree["groups"], saved)
        if self._strategy.collectives.rank == 0:
            _report_options(self._optimizer.param_groups, groups, is_scheduled=self._is_scheduled)
        entries = as_dict(tree["state"], "optimizer state")
        if unknown := [name for name in entries if name not in numbers]:
            raise _another(saved, f"it has a state of {unknown[0]!r}, which this one does not train")
        for group in self._optimizer.param_groups:
            parameters = dict(zip(self._members(group), group["params"], strict=True))
            self._check_entries({name: entries[name] for name in parameters if name in entries}, parameters, group)
        own = {numbers[name]: entry for name, entry in entries.items() if owns(self._strategy, name)}

        def commit() -> None:
            self._optimizer.load_state_dict({"state": own, "param_groups": groups})
            if isinstance(self._optimizer, RoutedOptimizer):
                return
            # With the strides of its parameter: files hold it contiguous, and a fused kernel walks both alike.
            for parameter, entry in self._optimizer.state.items():
                for key, value in entry.items():
                    is_full = isinstance(value, Tensor) and value.shape == parameter.shape
                    if is_full and value.stride() != parameter.stride():
                        entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

        return commit

    def _check_entries(self, entries: dict[str, Any], parameters: Mapping[str, Tensor], group: dict[str, Any]) -> None:
        """Raise CheckpointError for state that parameters of a group cannot have. A class not of torch may keep any."""
        optimizer = self._optimizer
        updater, fused = optimizer, bool(group.get("fused"))
        if isinstance(optimizer, RoutedOptimizer):
            updater, fused = optimizer.implementation, fused or optimizer.keeps_shapes
        shaped = fused or (name_of(type(updater)) is not None and not isinstance(updater, _OTHER_SHAPES))
        keys = {key for entry in entries.values() if isinstance(entry, dict) for key in entry}
        for name, saved in entries.items():
            entry = as_dict(saved, f"state of {name}", *(keys if shaped else ()))
            check_count(name, entry, strict=fused)
            if shaped:
                check_tensors(name, entry, parameters[name], strict=fused)

    def _kind(self) -> str:
        optimizer = self._optimizer
        return optimizer.name if isinstance(optimizer, RoutedOptimizer) else type(optimizer).__name__.lower()

    def _members(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(parameter)] for parameter in group["params"]]

    def _groups(self, entries: Any, saved: Saved) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Return the groups as the optimizer's `load_state_dict` takes them, and the number of each parameter."""
        own_count = len(self._optimizer.param_groups)
        if not isinstance(entries, list) or len(entries) != own_count:
            count = len(entries) if isinstance(entries, list) else "no"
            raise _another(saved, f"it has {count} parameter groups, and this one has {own_count}")
        numbers: dict[str, int] = {}
        groups = []
        for position, (live, entry) in enumerate(zip(self._optimizer.param_groups, entries, strict=True)):
            saved_group = as_dict(entry, "parameter group", "params", "lr")
            members = self._members(live)
            own = {key: value for key, value in live.items() if key not in (*SWITCHES, "params")}
            foreign = set(saved_group) - {"params"} - set(own)
            if left := sorted(foreign & _OF_SCHEDULERS):
                text = "%s: not restored, because this optimizer has no scheduler yet: make it before the resume"
                logger.warning(text, ", ".join(left))
                saved_group = {key: value for key, value in saved_group.items() if key not in left}
                foreign -= _OF_SCHEDULERS
            adamw = "decoupled_weight_decay"  # tells Adam from AdamW
            if differing := sorted(set(saved_group["params"]) ^ set(members), key=str):
                here, there = ("has", "does not") if (name := differing[0]) in members else ("lacks", "has it")
                why = f"parameter group {position} here {here} {name!r}, and that of the checkpoint {there}"
                raise _another(saved, why)
            if foreign or saved_group.get(adamw) != own.get(adamw):
                raise _another(
                    saved,
                    f"parameter group {position} has {len(members)} parameters with {sorted(own)} here, "
                    f"{len(saved_group['params'])} with {sorted(set(saved_group) - {'params'})} in the checkpoint",
                )
            for key in set(own) & set(saved_group):
                if not alike(own[key], saved_group[key]):
                    raise malformed(
                        f"the checkpoint's optimizer has {key}={saved_group[key]!r}, which cannot replace {own[key]!r}"
                    )
            if (missing := sorted(set(own) - set(saved_group))) and _OF_SCHEDULERS.intersection(missing):
                logger.warning("the saved optimizer had no scheduler, and this one has: the scheduler is not restored")
            elif missing:  # options that another version of torch did not have
                logger.warning("the checkpoint's optimizer lacks %s, and this one keeps its own", ", ".join(missing))
            for name in members:
                numbers[name] = len(numbers)
            switches = {key: live[key] for key in SWITCHES if key in live}
            if isinstance(live["lr"], Tensor):
                saved_group = {**saved_group, "lr": torch.full_like(live["lr"], saved_group["lr"])}
            groups.append({**own, **saved_group, **switches, "params": [numbers[name] for name in members]})
        return groups, numbers


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


def _report_options(own: list[dict[str, Any]], restored: list[dict[str, Any]], *, is_scheduled: bool) -> None:
    """Log the first option of which the script's value differs from the checkpoint's, which is used."""
    for live, new in zip(own, restored, strict=True):
        # By a schedule: torch's write `initial_lr`, but ReduceLROnPlateau.
        moved = {"lr", "momentum", "betas"} if is_scheduled or "initial_lr" in live else set()
        for key in sorted(live.keys() & new.keys() - moved - {"params", *SWITCHES}):
            if live[key] != new[key]:
                logger.warning(
                    "the script's %s is %s, and the checkpoint's is %s: training continues with the checkpoint's. "
                    "To change it, set it in the optimizer's groups after the resume",
                    "learning rate" if key in ("lr", "initial_lr") else key,
                    *(f"{float(value):g}" if isinstance(value, Tensor) else value for value in (live[key], new[key])),
                )
                return


def _another(saved: Saved, why: str) -> CheckpointError:
    return CheckpointError(
        f"{saved.source} belongs to another optimizer",
        why=why,
        remedy=f'build the optimizer as it was when it was saved; for the model only, call trainer.load("{saved.path}")'
        if saved.path
        else "create the optimizer that it belongs to, or save a file without the optimizer's state",
    )
