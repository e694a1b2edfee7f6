"""The optimizer's part of a checkpoint: by the names of the parameters, free of how an update is computed."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.errors import CheckpointError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.slot_state import COUNTERS, SWITCHES
from accelcore.training.gradients import Gradients
from accelcore.training.parts.kept import Kept, check_shapes
from accelcore.training.parts.part import Change, Saved, table
from accelcore.training.parts.put_back import copied, put_back

__all__ = ["OptimizerPart", "OwnStatePart"]

logger = logging.getLogger("accelcore")

_TELLS_ADAM_FROM_ADAMW = "decoupled_weight_decay"
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""What torch's schedulers write into the groups of their optimizer."""


class OptimizerPart:
    """An optimizer's groups and state, under the names of its parameters.

    It moves between the routes of the registry and torch's own classes, and between devices.

    Args:
        owns: whether this rank has the state of a parameter, by name.
        divided: whether other ranks have the state of some parameters, and save it: see `OwnStatePart`.
    """

    name = "optimizer"
    scope: Literal["shared"] = "shared"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        gradients: Gradients,
        *,
        owns: Callable[[str], bool] = lambda name: True,
        divided: bool = False,
    ) -> None:
        self._optimizer, self._owns, self._divided = optimizer, owns, divided
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # In the groups of an optimizer that is not ours are the masters.
        self._names.update({id(slot.trained): slot.name for slot in gradients.slots})

    def state(self) -> dict[str, Any]:
        state = self._optimizer.state_dict()
        order: dict[int, str] = {}
        groups = []
        for group, live in zip(state["param_groups"], self._optimizer.param_groups, strict=True):
            members = self._members(live)
            order.update(zip(group["params"], members, strict=True))
            options = {key: value for key, value in group.items() if key not in SWITCHES}
            options["lr"] = float(options["lr"])  # a tensor where steps are captured
            groups.append({**options, "params": members})
        tree = {"kind": self._kind(), "groups": groups}
        if self._divided:
            return tree
        return {**tree, "state": {order[number]: entry for number, entry in state["state"].items()}}

    def own_state(self) -> dict[str, Any]:
        """The state that this rank has to save for itself, by the names of the parameters; none where rank 0 does."""
        if not self._divided:
            return {}
        state = self._optimizer.state_dict()
        numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
        names = chain.from_iterable(map(self._members, self._optimizer.param_groups))
        held = ((name, state["state"].get(number)) for number, name in zip(numbers, names, strict=True))
        return {name: entry for name, entry in held if entry and self._owns(name)}

    def prepare(self, saved: Saved) -> Change:
        tree = table(saved.shared.get("optimizer"), "optimizer state", "groups", "state")
        if tree.get("kind", self._kind()) != self._kind():
            raise _another(f"it is {tree['kind']!r}, and this one is {self._kind()!r}")
        groups, numbers = self._groups(tree["groups"])
        entries = table(tree["state"], "optimizer state")
        if strange := [name for name in entries if name not in numbers]:
            raise _another(f"it has a state of {strange[0]!r}, which this one does not train")
        engine = self._optimizer.engine if isinstance(self._optimizer, RoutedOptimizer) else self._optimizer
        shaped = isinstance(self._optimizer, RoutedOptimizer) and self._optimizer.keeps_shapes
        for group, options in zip(self._optimizer.param_groups, groups, strict=True):
            strict = shaped or bool(group.get("fused"))
            keeps, first = Kept(type(engine), options), None
            for name, parameter in zip(self._members(group), group["params"], strict=True):
                if name not in entries:
                    continue
                entry = table(entries[name], f"state of {name}")
                _check_count(name, entry, strict=strict)
                if not strict:
                    check_shapes(name, entry, parameter, keeps.shapes(parameter))
                    continue
                check_shapes(name, entry, parameter, {key: _shape(key, parameter) for key in entry})
                first = first or name
                if entry.keys() != entries[first].keys():
                    raise CheckpointError(f"the checkpoint's states of {name!r} and {first!r} are of other kinds")
        own = {numbers[name]: entry for name, entry in entries.items() if self._owns(name)}
        state = {"state": own, "param_groups": groups}

        now = self._optimizer.state_dict()
        # Its options keep their devices: a learning rate that is captured has to be on one.
        before = {"state": copied(now["state"]), "param_groups": copy.deepcopy(now["param_groups"])}

        def load(whole: dict[str, Any]) -> None:
            self._optimizer.load_state_dict(whole)
            if not isinstance(self._optimizer, RoutedOptimizer):
                _lay_out_as_parameters(self._optimizer)

        return Change(lambda: load(state), lambda: put_back(load, before, self._optimizer.state_dict))

    def _kind(self) -> str:
        optimizer = self._optimizer
        return optimizer.name if isinstance(optimizer, RoutedOptimizer) else type(optimizer).__name__.lower()

    def _members(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(parameter)] for parameter in group["params"]]

    def _groups(self, saved: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The groups as this optimizer's own `load_state_dict` takes them, and the number of each parameter."""
        if not isinstance(saved, list) or len(saved) != len(self._optimizer.param_groups):
            count = len(saved) if isinstance(saved, list) else "no"
            raise _another(f"it has {count} parameter groups, and this one {len(self._optimizer.param_groups)}")
        numbers: dict[str, int] = {}
        groups = []
        for position, (live, entry) in enumerate(zip(self._optimizer.param_groups, saved, strict=True)):
            saved_group = table(entry, "parameter group", "params", "lr")
            members = self._members(live)
            own = {key: value for key, value in live.items() if key not in (*SWITCHES, "params")}
            foreign = set(saved_group) - {"params"} - set(own)
            if left := sorted(foreign & _OF_SCHEDULERS):
                logger.warning(
                    "the checkpoint's optimizer has a scheduler's %s, and here no scheduler was made for it yet: "
                    "they are left out",
                    ", ".join(left),
                )
                saved_group = {key: value for key, value in saved_group.items() if key not in left}
                foreign -= _OF_SCHEDULERS
            tells = _TELLS_ADAM_FROM_ADAMW
            if set(saved_group["params"]) != set(members) or foreign or saved_group.get(tells) != own.get(tells):
                raise _another(
                    f"parameter group {position} has {len(members)} parameters with {sorted(own)} here, "
                    f"{len(saved_group['params'])} with {sorted(set(saved_group) - {'params'})} there"
                )
            for key in set(own) & set(saved_group):
                if not _alike(own[key], saved_group[key]):
                    raise CheckpointError(
                        f"the checkpoint's optimizer says {key}={saved_group[key]!r} (here {own[key]!r})"
                    )
            if missing := sorted(set(own) - set(saved_group)):  # options that another version of torch did not have
                logger.warning("the checkpoint's optimizer has no %s: they stay as they are here", ", ".join(missing))
            for name in members:
                numbers[name] = len(numbers)
            switches = {key: live[key] for key in SWITCHES if key in live}
            if isinstance(live["lr"], Tensor):
                saved_group = {**saved_group, "lr": torch.full_like(live["lr"], saved_group["lr"])}
            groups.append({**own, **saved_group, **switches, "params": [numbers[name] for name in members]})
        return groups, numbers


class OwnStatePart:
    """The optimizer's state of what this rank alone updates."""

    name = "updates"
    scope: Literal["rank"] = "rank"

    def __init__(self, optimizer: OptimizerPart) -> None:
        self._optimizer = optimizer

    def state(self) -> dict[str, Any]:
        return self._optimizer.own_state()

    def prepare(self, saved: Saved) -> Change:
        return Change(lambda: None)  # all ranks' together are the optimizer's state: that part restores it


def _another(why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is of another optimizer",
        why=why,
        remedy="build the optimizer as it was when the checkpoint was saved",
    )


def _alike(own: Any, saved: Any) -> bool:
    """Whether a saved option may take the place of one of this kind."""
    if own is None or saved is None or isinstance(own, Tensor):
        return True
    if isinstance(own, bool) or isinstance(saved, bool):
        return isinstance(own, bool) and isinstance(saved, bool)
    if isinstance(own, int | float):
        return isinstance(saved, int | float) and not math.isnan(saved)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(own) == len(saved) and all(map(_alike, own, saved))
    return isinstance(saved, type(own))


def _check_count(name: str, entry: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a number of updates that is none; `strict`: or that is no scalar."""
    value = entry.get("step", 0)
    if isinstance(value, Tensor) and value.numel() == 1 and not (strict and value.dim()):
        value = value.item()
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CheckpointError(f"the checkpoint says that {name!r} was updated {value!r} times")


def _shape(key: str, parameter: Tensor) -> tuple[int, ...]:
    """The shape of state of an optimizer that keeps a value for each element, and some for the parameter as a whole."""
    return () if key in COUNTERS else tuple(parameter.shape)


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Give state the strides of its parameter: files hold it dense, and a fused kernel walks both alike."""
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                entry[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
