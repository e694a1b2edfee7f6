"""Reading what other programs have saved: torch, accelerate, Lightning. Nothing in a file is ever run."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from accelcore.errors import CheckpointError

__all__ = ["Foreign", "read_foreign"]

logger = logging.getLogger("accelcore")

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
# What accelerate and transformers write into a folder, preferred first.
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OPTIMIZER_FILE = "optimizer.bin"
_COMPILED = "_orig_mod."  # what torch.compile puts into the names of a module


@dataclass(frozen=True)
class Foreign:
    """What another program has saved.

    Attributes:
        model: a model's `state_dict`.
        optimizer: an optimizer's, its parameters by number; None where there is none.
        rest: everything else, as it was saved.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    rest: dict[str, Any]


def read_foreign(path: Path, names: Collection[str]) -> Foreign:
    """Read a file of `torch.save` (`.pth`, `.pt`, Lightning's `.ckpt`) or of safetensors, or accelerate's folder.

    Args:
        names: those in the model's own `state_dict`. What wrappers have put before them (`module.`, `_orig_mod.`, in a
            LightningModule the name of an attribute) is taken off.

    Raises:
        CheckpointError: it cannot be read, or no model's `state_dict` is in it.
    """
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
                f"no model's state_dict is found in {path}",
                available=f"in it: {', '.join(map(str, tree))}",
                remedy=f"save it under one of {', '.join(_MODEL)}, or load it by model.load_state_dict",
            )
        model = rest.pop(name)
    optimizer = rest.pop(next((name for name in _OPTIMIZER if name in rest), ""), None)
    if isinstance(optimizer, list) and len(optimizer) == 1:  # Lightning's
        optimizer = optimizer[0]
    if optimizer is not None and not (isinstance(optimizer, Mapping) and {"state", "param_groups"} <= set(optimizer)):
        raise CheckpointError(
            f"what {path} has of an optimizer is not one optimizer's state_dict", remedy="load it by hand"
        )
    return Foreign(_renamed(model, names), None if optimizer is None else dict(optimizer), rest)


def _renamed(model: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A model's state under its own names; as it is, where no prefix makes them fit."""
    plain = {name.replace(_COMPILED, ""): value for name, value in model.items()}
    first = next(iter(names), "")
    for prefix in sorted({name[: -len(first)] for name in plain if first and name.endswith(first)}, key=len):
        if all(prefix + name in plain for name in names):
            if left := [name for name in plain if not name.startswith(prefix) or name[len(prefix) :] not in names]:
                logger.warning("not loaded, because the model has no such names: %s", ", ".join(left))
            return {name: plain[prefix + name] for name in names}
    return plain


def _of_folder(folder: Path) -> dict[str, Any]:
    name = next((name for name in _FILES if (folder / name).is_file()), None)
    if name is None:
        raise CheckpointError(f"no model is found in {folder}", available=f"names that are known: {', '.join(_FILES)}")
    if name.endswith(".json"):
        model: dict[str, Any] = {}
        for part in sorted(set(_weight_map(folder / name).values())):
            model.update(_read(folder / Path(part).name))
    else:
        model = _read(folder / name)
    optimizer = folder / _OPTIMIZER_FILE
    return {"model": model, **({"optimizer": _read(optimizer)} if optimizer.is_file() else {})}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(part) for name, part in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of a model's files", why=repr(error)) from error


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading that would run code",
            why=str(error).strip().split("\n", 1)[0],
            remedy="where you trust it, name the classes in it by torch.serialization.add_safe_globals; or save its "
            "state_dicts anew, alone",
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error).strip().split("\n", 1)[0]) from error


def _is_state(tree: Any) -> bool:
    """Whether this is a model's state: names and tensors, and at most what modules add to them."""
    return (
        isinstance(tree, Mapping)
        and any(isinstance(value, Tensor) for value in tree.values())
        and all(isinstance(name, str) for name in tree)
        and not any(isinstance(value, Mapping) for name, value in tree.items() if not name.endswith("_extra_state"))
    )
