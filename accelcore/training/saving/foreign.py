"""Reading of what other programs have saved: torch, accelerate, Lightning. No code in a file is run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from accelcore.checkpoint import folders
from accelcore.errors import CheckpointError, logger, nearest
from accelcore.optim.shards import divided_as
from accelcore.training.saving.optimizer_part import OptimizerPart
from accelcore.training.saving.parts import Part, Saved, as_dict
from accelcore.util.text import first_line

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
# Files that accelerate and transformers write, preferred first.
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OPTIMIZER_FILE = "optimizer.bin"
_COMPILED = "_orig_mod."  # torch.compile adds it to the names of a module


def read_foreign(named: Mapping[str, Part], path: Path, optimizer: bool | None) -> tuple[Saved, dict[str, Any]]:
    """Return the model and, if it is wanted, the optimizer of another program's file; and the rest of the file."""
    own = named["model"].shared_state()
    model, of_optimizer, rest = _read_states(path, own.keys())
    if optimizer and of_optimizer is None:
        remedy = "remove optimizer=True; or give the folder that trainer.save returned, if it wrote this file"
        raise CheckpointError(f"{path} has no state of an optimizer", remedy=remedy)
    exact = {}
    for name, saved_value in list(model.items()):
        like = own.get(name)
        if isinstance(saved_value, Tensor) and isinstance(like, Tensor):
            model[name] = value = divided_as(saved_value, like)
            if value.is_floating_point():
                model[name], exact[name] = value.to(like.dtype), value.float()
    masters = named["masters"].shared_state()
    shared: dict[str, Any] = {"masters": {name: exact[name] for name in masters if name in exact}}
    if of_optimizer is not None and optimizer is not False:
        part = named["optimizer"]
        assert isinstance(part, OptimizerPart), "it has this name"
        shared["optimizer"] = by_name = _by_name(of_optimizer, part, path)
        for name, entry in by_name["state"].items():
            by_name["state"][name] = {key: divided_as(value, own[name]) for key, value in entry.items()}
    return Saved(model, shared, {}, same_job=True, source=str(path), path=""), rest


def _by_name(state: Mapping[str, Any], part: OptimizerPart, path: Path) -> dict[str, Any]:
    """Return an optimizer's `state_dict` under the names of its parameters, which it numbers in the order of groups."""
    own = part.shared_state()
    groups = [as_dict(group, "parameter group", "params") for group in state["param_groups"]]
    numbers = list(chain.from_iterable(group["params"] for group in groups))
    names = list(chain.from_iterable(group["params"] for group in own["groups"]))
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own["groups"]]:
        raise CheckpointError(
            f"the optimizer in {path} has other parameter groups than this one",
            why=f"they have {[len(group['params']) for group in groups]} parameters, and here "
            f"{[len(group['params']) for group in own['groups']]}",
            remedy="create the optimizer with the groups it had when it was saved",
        )
    name_of = dict(zip(numbers, names, strict=True))
    return {
        "groups": [
            {key: value for key, value in group.items() if key in own_group}
            | part.results(group)
            | {"params": [name_of[number] for number in group["params"]]}
            for group, own_group in zip(groups, own["groups"], strict=True)
        ],
        "state": {name_of[number]: entry for number, entry in state["state"].items() if number in name_of},
        "of_all": {key: value for key, value in state["state"].items() if isinstance(key, str)},
    }


def _read_states(path: Path, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """Return the `state_dict` of the model, that of the optimizer if it was saved, and the rest; see `Trainer.load`.

    Prefixes of wrappers (`module.`, `_orig_mod.`, the attribute of a LightningModule) are removed from the saved names.
    """
    if not path.exists():
        near = nearest(path.name, (beside.name for beside in path.parent.glob("*")))
        remedy = f"did you mean {path.with_name(near)}?" if near else "correct the path"
        raise CheckpointError(f"there is no file or folder {path}", why=f"seen from {Path.cwd()}", remedy=remedy)
    tree = _of_folder(path) if path.is_dir() else _read(path)
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{path} holds a {type(tree).__name__}", remedy="give a file with a state_dict in it")
    rest = dict(tree)
    if _is_state(tree):
        model, rest = tree, {}
    else:
        name = next((name for name in _MODEL if _is_state(tree.get(name))), None)
        if name is None:
            raise CheckpointError(
                f"{path} has no state_dict of a model, but: {', '.join(map(str, tree))}",
                remedy=f"save it under one of {', '.join(_MODEL)}, or load it by model.load_state_dict",
            )
        model = rest.pop(name)
    optimizer = rest.pop(next((name for name in _OPTIMIZER if name in rest), ""), None)
    if isinstance(optimizer, list) and len(optimizer) == 1:  # Lightning's
        optimizer = optimizer[0]
    if optimizer is not None and not (isinstance(optimizer, Mapping) and {"state", "param_groups"} <= set(optimizer)):
        remedy = "load it yourself by optimizer.load_state_dict"
        raise CheckpointError(f"the optimizer in {path} is not the state_dict of one optimizer", remedy=remedy)
    return _renamed(model, names), None if optimizer is None else dict(optimizer), rest


def _renamed(model: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove the prefix that makes the saved names fit the model's; change nothing if there is no such prefix."""
    plain = {name.replace(_COMPILED, ""): value for name, value in model.items()}
    first = next(iter(names), "")
    found = [name[: -len(first)] for name in plain if first and name.endswith(first)]
    found = [prefix for prefix in found if all(prefix + name in plain for name in names)]
    if "" in found:
        found = [""]
    if len(found) > 1:  # such as a student and a teacher
        raise CheckpointError(
            f"{len(found)} parts of the file have the names of this model: {', '.join(found[:5])}",
            remedy="choose one yourself, and load it by model.load_state_dict",
        )
    for prefix in found:
        if left := [name for name in plain if not name.startswith(prefix) or name[len(prefix) :] not in names]:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            logger.warning("not loaded, because the model has no such names: %s%s", ", ".join(left[:5]), more)
        return {name: plain[prefix + name] for name in names}
    return plain


def _of_folder(folder: Path) -> dict[str, Any]:
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointError(
            f"there is no model in {folder}",
            why=f"it has neither a checkpoint nor one of the files {', '.join(_FILES)}",
            available=folders.near(folder),
            remedy="give the folder that has one",
        )
    files, model = [name], {}
    if name.endswith(".json"):  # an index of several files
        files = sorted(set(json.loads((folder / name).read_bytes())["weight_map"].values()))
    for file in files:
        model.update(_read(folder / Path(file).name))
    optimizer = folder / _OPTIMIZER_FILE
    return {"model": model, **({"optimizer": _read(optimizer)} if optimizer.is_file() else {})}


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        with torch.device("cpu"):  # safetensors would read to the default device
            return load_file(path)
    with path.open("rb") as file:
        begin = file.read(8)
    if not begin.startswith((b"PK", b"\x80")):  # torch's archive, or a pickle
        remedy = "give a file of torch.save, or one of safetensors whose name ends in .safetensors"
        raise CheckpointError(f"{path} is not a file of torch.save", why=f"it begins with {begin!r}", remedy=remedy)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading it would run code",
            why=first_line(str(error).rpartition("WeightsUnpickler error: ")[2]).partition(". Please")[0],
            remedy="if you trust it, allow its classes by torch.serialization.add_safe_globals; or save only the "
            "state_dicts again",
        ) from error


def _is_state(tree: Any) -> bool:
    """Check if this is a model's state_dict: names with tensors, and possibly with extra state of modules."""
    return (
        isinstance(tree, Mapping)
        and any(isinstance(value, Tensor) for value in tree.values())
        and all(isinstance(name, str) for name in tree)
        and not any(isinstance(value, Mapping) for name, value in tree.items() if not name.endswith("_extra_state"))
    )
