"""The optimizer's groups and state in a checkpoint, under the names of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Optimizer

from accelcore.errors import CheckpointError, logger
from accelcore.optim.binding import COUNTERS, SWITCHES
from accelcore.optim.engine import name_of
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.training.gradients import Gradients
from accelcore.training.parallel.strategy import Strategy, owns
from accelcore.training.saving.parts import Part, Saved, as_dict, malformed
from accelcore.util.containers import item
from accelcore.util.text import kind_of

_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Entries that torch's schedulers write into the groups of their optimizer."""
_OTHER_SHAPES = (Adafactor, LBFGS)  # classes of torch whose state has other shapes than the parameters


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
            if isinstance(options.get("lr"), Tensor):  # steps are captured
                options["lr"] = float(options["lr"])
            groups.append({**options, "params": self._members(live)})
        # Some classes, such as MADGRAD, count their steps once for all parameters.
        of_all = {key: value for key, value in self._state_dict["state"].items() if isinstance(key, str)}
        divided = self._strategy.owners is not None
        return {"kind": self._kind(), "groups": groups, "of_all": of_all} | (
            {} if divided else {"state": self._entries()}
        )

    def own_state(self) -> dict[str, Any] | None:
        return None if self._strategy.owners is None else {"state": self._entries()}

    @cached_property
    def _state_dict(self) -> dict[str, Any]:  # the same for `shared_state` and `own_state`: each save makes its parts
        state = self._optimizer.state_dict()
        if not {"state", "param_groups"} <= set(state):  # as some that wrap another optimizer
            raise CheckpointError(
                f"the state_dict of {kind_of(self._optimizer)} has {', '.join(map(repr, state))}",
                why="a checkpoint holds the state of each parameter, and torch's form is 'state' and 'param_groups'",
                remedy="take an optimizer whose state_dict has this form, or save the states yourself, by torch.save",
            )
        return state

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
            self._report_options(groups)
        entries = as_dict(tree["state"], "optimizer state")
        if unknown := [name for name in entries if name not in numbers]:
            raise _another(saved, f"it has a state of {unknown[0]!r}, which this one does not train")
        for group in self._optimizer.param_groups:
            parameters = dict(zip(self._members(group), group["params"], strict=True))
            self._check_entries({name: entries[name] for name in parameters if name in entries}, parameters, group)
        own: dict[Any, Any] = {numbers[name]: entry for name, entry in entries.items() if owns(self._strategy, name)}
        own.update(as_dict(tree.get("of_all", {}), "optimizer state of all parameters"))

        def commit() -> None:
            self._optimizer.load_state_dict({"state": own, "param_groups": groups})
            if isinstance(self._optimizer, RoutedOptimizer):
                return
            # With the strides of its parameter: files hold it contiguous, and a fused kernel walks both alike.
            for parameter in chain.from_iterable(group["params"] for group in self._optimizer.param_groups):
                entry = self._optimizer.state.get(parameter, {})
                for key, value in entry.items():
                    is_full = isinstance(value, Tensor) and value.shape == parameter.shape
                    if is_full and value.stride() != parameter.stride():
                        entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)

        return commit

    def results(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return what steps have written into a group: its entries that are not options."""
        options = self._options(group)
        return {key: value for key, value in group.items() if key not in options and key not in ("params", *SWITCHES)}

    def _options(self, group: Mapping[str, Any]) -> set[str]:
        keys = set(group) - {"params", *SWITCHES}
        return keys if self._arguments is None else keys & self._arguments

    @cached_property
    def _arguments(self) -> set[str] | None:
        """The names of all options of a class that is not torch's; None for others, whose groups have only options."""
        if isinstance(self._optimizer, RoutedOptimizer) or name_of(type(self._optimizer)) is not None:
            return None
        used = [self._optimizer]
        for each in used:  # and those that it wraps, as Lookahead does
            used += [value for value in vars(each).values() if isinstance(value, Optimizer) and value not in used]
        classes = chain.from_iterable(type(each).__mro__ for each in used)  # `**options` may be those of a base class
        arguments = (signature(each).parameters for each in classes if issubclass(each, Optimizer))
        return {"lr", *_OF_SCHEDULERS, *chain.from_iterable(arguments)}

    def _report_options(self, restored: list[dict[str, Any]]) -> None:
        """Log the first option of which the script's value differs from the checkpoint's, which is used."""
        for live, new in zip(self._optimizer.param_groups, restored, strict=True):
            # By a schedule: torch's write `initial_lr`, but ReduceLROnPlateau.
            moved = {"lr", "momentum", "betas"} if self._is_scheduled or "initial_lr" in live else set()
            for key in sorted(self._options(live) & set(new) - moved):
                if live[key] != new[key]:
                    logger.warning(
                        "the script's %s is %s, and the checkpoint's is %s: training continues with the checkpoint's. "
                        "To change it, set it in the optimizer's groups after the resume",
                        "learning rate" if key in ("lr", "initial_lr") else key,
                        *(
                            f"{float(value):g}" if isinstance(value, Tensor) else value
                            for value in (live[key], new[key])
                        ),
                    )
                    return

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
            _check_count(name, entry, strict=fused)
            if shaped:
                _check_tensors(name, entry, parameters[name], strict=fused)

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
            saved_group = as_dict(entry, "parameter group", "params", *({"lr"} & set(live)))
            members = self._members(live)
            own = {key: value for key, value in live.items() if key not in (*SWITCHES, "params")}
            foreign = self._options(saved_group) - set(own)
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
            for key in self._options(own) & set(saved_group):
                if not _alike(own[key], saved_group[key]):
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
            if isinstance(live.get("lr"), Tensor):
                saved_group = {**saved_group, "lr": torch.full_like(live["lr"], saved_group["lr"])}
            groups.append({**own, **saved_group, **switches, "params": [numbers[name] for name in members]})
        return groups, numbers


def _another(saved: Saved, why: str) -> CheckpointError:
    return CheckpointError(
        f"{saved.source} belongs to another optimizer",
        why=why,
        remedy=f'build the optimizer as it was when it was saved; for the model only, call trainer.load("{saved.path}")'
        if saved.path
        else "create the optimizer that it belongs to, or save a file without the optimizer's state",
    )


def _alike(own: Any, saved: Any) -> bool:
    """Check if a saved option has a type that can replace this value."""
    if own is None or saved is None or isinstance(own, Tensor):
        return True
    own = item(own)  # a checkpoint has scalars of NumPy as plain numbers
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if isinstance(own, int | float):
        return isinstance(saved, int | float) and not math.isnan(saved)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(own) == len(saved) and all(map(_alike, own, saved))
    return isinstance(saved, type(own))


def _check_count(name: str, entry: Mapping[str, Any], *, strict: bool) -> None:
    """Raise CheckpointError for a number of updates that is not a count, or, if `strict`, not a scalar."""
    value = entry.get("step", 0)
    if isinstance(value, Tensor) and value.numel() == 1 and not (strict and value.dim()):
        value = value.item()
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise malformed(f"the checkpoint has {value!r} as the number of times {name!r} was updated")


def _check_tensors(name: str, entry: Mapping[str, Any], parameter: Tensor, *, strict: bool) -> None:
    """Raise CheckpointError for a tensor that is neither a scalar nor shaped as its parameter, or of another type.

    If `strict`, each key must be a tensor of the parameter's shape, and the `COUNTERS` must be scalars.
    """
    for key, value in entry.items():
        if not isinstance(value, Tensor):
            fits = not strict or (key in COUNTERS and isinstance(value, int | float))
        elif key in COUNTERS or (not strict and value.dim() == 0):
            fits = value.dim() == 0 or (not strict and value.shape == (1,))
        else:
            numbers = value.is_complex() if parameter.is_complex() else value.is_floating_point()
            fits = numbers and value.shape == parameter.shape
        if not fits:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise malformed(
                f"the checkpoint's {key} of {name!r} is {found}, and its parameter has shape {tuple(parameter.shape)}"
            )
