"""Conversion of what other programs saved to the parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from accelcore.checkpoint.foreign import read_foreign
from accelcore.errors import CheckpointError
from accelcore.training.saving.part import Part, Saved, table

__all__ = ["prepare_foreign"]


def prepare_foreign(parts: Sequence[Part], path: Path) -> tuple[list[Callable[[], None]], dict[str, Any]]:
    """Return the functions that restore the model and, if it was saved, the optimizer; and the rest of the file.

    Raises:
        CheckpointError: the file cannot be read, or does not fit.
    """
    named = {part.name: part for part in parts}
    own = named["model"].state()
    found = read_foreign(path, own.keys())
    model, exact = dict(found.model), {}
    for name, value in found.model.items():
        like = own.get(name)
        if isinstance(value, Tensor) and isinstance(like, Tensor) and value.is_floating_point():
            model[name], exact[name] = value.to(like.dtype), value.float()
    shared: dict[str, Any] = {"masters": {name: exact[name] for name in named["masters"].state() if name in exact}}
    wanted = ["model", "masters"]
    if found.optimizer is not None:
        shared["optimizer"] = _by_name(found.optimizer, named["optimizer"].state())
        wanted.append("optimizer")
    saved = Saved(model, shared, {}, same_job=True)
    return [named[name].prepare(saved) for name in wanted], found.rest


def _by_name(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` under the names of its parameters, which it numbers in the order of groups."""
    groups = [table(group, "parameter group", "params") for group in state["param_groups"]]
    numbers = list(chain.from_iterable(group["params"] for group in groups))
    names = list(chain.from_iterable(group["params"] for group in own["groups"]))
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own["groups"]]:
        raise CheckpointError(
            "the file's optimizer has other parameter groups than this one",
            why=f"they have {[len(group['params']) for group in groups]} parameters, and here "
            f"{[len(group['params']) for group in own['groups']]}",
            remedy="create the optimizer with the groups it had when it was saved",
        )
    name_of = dict(zip(numbers, names, strict=True))
    options = [
        {key: value for key, value in group.items() if key in own_group}
        for group, own_group in zip(groups, own["groups"], strict=True)
    ]
    return {
        "groups": [
            {**chosen, "params": [name_of[number] for number in group["params"]]}
            for chosen, group in zip(options, groups, strict=True)
        ],
        "state": {name_of[number]: entry for number, entry in state["state"].items() if number in name_of},
    }
