"""Reading of checkpoints, to resume or load them, and of what other programs saved: torch, accelerate, Lightning.

No code in a file is run.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from accelcore.backend import Backend
from accelcore.checkpoint import store
from accelcore.checkpoint.manifest import MANIFEST, MODEL, RANK, digest_of_manifest, file_of
from accelcore.checkpoint.store import Checkpoint
from accelcore.errors import CheckpointError, ConfigurationError, logger
from accelcore.optim.shards import divided_as
from accelcore.training.agreement import all_equal
from accelcore.training.saving.parts import SHARED, Part, Saved, as_dict
from accelcore.util.text import first_line, nearest

_MODEL = ("model", "state_dict", "model_state_dict", "model_state", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states", "optim")
# Files that accelerate and transformers write, preferred first.
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OPTIMIZER_FILE = "optimizer.bin"
_COMPILED = "_orig_mod."  # torch.compile adds it to the names of a module
_NEEDS_STATE = ("amsgrad", "centered", "momentum")
"""Options with which an optimizer has state that it does not have without them."""


@contextmanager
def as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert any other error of a file or a state to a CheckpointError."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} cannot be restored",
            why=repr(error),
            remedy="give another checkpoint, or build model and optimizer as they were when it was saved",
        ) from error


def read_saved(
    checkpoint: Checkpoint, trainer: str, rank: int, world_size: int, sharded: Mapping[str, Tensor]
) -> Saved:
    """Read one trainer's part of a checkpoint, for this rank."""
    saved_by = checkpoint.manifest["world_size"]
    same_job, like_of = saved_by == world_size, partial(_like_of, sharded)
    of_ranks = [file_of(trainer, f"{RANK}{number:05d}") for number in range(saved_by)]
    model = as_dict(checkpoint.read(file_of(trainer, MODEL), like_of), "model")
    shared = as_dict(checkpoint.read(file_of(trainer, SHARED), like_of), "training state")
    own = as_dict(checkpoint.read(of_ranks[rank if same_job else 0]), "state of this rank")
    if "state" not in (optimizer := as_dict(shared.get("optimizer"), "optimizer state")):
        optimizer["state"] = {}
        for file in of_ranks:  # each rank saved the state of the parameters that it updates
            divided = as_dict(checkpoint.read(file, like_of), file, "optimizer")["optimizer"]
            optimizer["state"] |= as_dict(as_dict(divided, "optimizer state", "state")["state"], "optimizer state")

    def is_closed(path: Path) -> bool:
        return not Checkpoint(path).read(of_ranks[0])["window"]["micro"]

    closed = partial(store.older, checkpoint.path, is_closed)
    path = str(checkpoint.path / trainer)
    return Saved(model, shared, own, same_job, f"the checkpoint {checkpoint.path}", path, closed)


def check_position(saved: Saved, saved_by: int, world_size: int) -> None:
    """Raise CheckpointError if a job of another size saved within an epoch: the data are divided in another way."""
    if saved.same_job:
        return
    within = as_dict(saved.own.get("window"), "window", "micro")["micro"]
    if within or as_dict(saved.own.get("data"), "position in the data", "taken")["taken"]:
        raise CheckpointError(
            f"the checkpoint was saved within an epoch by a job of size {saved_by}, and this has size {world_size}",
            remedy=f"resume in a job of size {saved_by}, or from a checkpoint saved at the end of an epoch; or begin a "
            f'new run, in another folder, by trainer.load("{saved.path}", optimizer=True)',
        )


def _like_of(sharded: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor | None:
    """Return the sharded parameter that a stored tensor of this shape belongs to, or None."""
    if name.startswith("optimizer.state."):
        name = name.removeprefix("optimizer.state.").rpartition(".")[0]
    parameter = sharded.get(name.removeprefix("masters."))
    return parameter if parameter is not None and parameter.shape == shape else None


def check_same(backend: Backend, folder: Path, checkpoint: Checkpoint | None) -> None:
    """Raise CheckpointError if the ranks have found different checkpoints."""
    if not all_equal(backend, "" if checkpoint is None else digest_of_manifest(checkpoint.manifest)):
        raise CheckpointError(
            f"the ranks do not find the same checkpoint in {folder}",
            why="this rank finds " + ("none" if checkpoint is None else checkpoint.path.name),
            remedy="give all ranks one folder that all of them see",
        )


def check_trainers(checkpoint: Checkpoint, trainings: Mapping[str, object]) -> None:
    """Raise CheckpointError if a checkpoint has other trainers than these."""
    saved = checkpoint.manifest["trainers"]
    if saved.keys() != trainings.keys():
        contains, resuming = (", ".join(filter(None, sorted(names))) or "one trainer" for names in (saved, trainings))
        together = f"accelcore.Together({', '.join(f'{name}=...' for name in saved)}).resume(...)"
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} contains {contains}, but you are resuming {resuming}",
            remedy="resume it as it was saved: by " + ("trainer.resume(...)" if "" in saved else together),
        )


def prepare_load(
    parts: Sequence[Part], path: Path, share: tuple[int, int], sharded: Mapping[str, Tensor], optimizer: bool | None
) -> tuple[list[Callable[[], object]], dict[str, Any], Checkpoint | None]:
    """Return the functions that restore what `Trainer.load` takes, the rest, and the checkpoint if it is one.

    `share`: rank and number of the ranks.
    """
    named = {part.name: part for part in parts}
    checkpoint, name = _find_checkpoint(path, share)
    if checkpoint is None:
        saved, rest = _saved_foreign(named, path, optimizer)
        takes = "optimizer" in saved.shared
    else:
        saved, takes = read_saved(checkpoint, name, *share, sharded), bool(optimizer)
        rest = saved.shared["extra"]
    if optimizer:
        theirs, ours = saved.shared["optimizer"], named["optimizer"].shared_state()
        shared = {**saved.shared, "optimizer": _with_options(theirs, ours, saved.source)}
        saved = replace(saved, shared=shared, own={"window": {"micro": 0}})  # the gradients of a window are left out
    wanted = ["model", "masters", *(["optimizer"] if takes else [])]
    return [named[part].prepare(saved) for part in wanted], rest, checkpoint


def _find_checkpoint(path: Path, share: tuple[int, int]) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint at `path` or the newest in it, and the trainer's name; None for another program's file."""
    path = path.resolve()  # the parent of ".." is not the folder above
    if path.is_dir() and (path.parent / MANIFEST).is_file():  # one of several trainers
        return Checkpoint(path.parent, share), path.name
    if not ((path / MANIFEST).is_file() or any(path.glob(f"*/{MANIFEST}"))):
        return None, ""
    checkpoint = store.find(path, share)
    if checkpoint is not None and "" not in (trainers := checkpoint.manifest["trainers"]):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} holds several trainers: {', '.join(trainers)}",
            remedy=f'give the folder of one: trainer.load("{checkpoint.path / next(iter(trainers))}")',
        )
    return checkpoint, ""


def _saved_foreign(named: Mapping[str, Part], path: Path, optimizer: bool | None) -> tuple[Saved, dict[str, Any]]:
    """Return the model and, if it is wanted, the optimizer of another program's file; and the rest of the file."""
    own = named["model"].shared_state()
    model, of_optimizer, rest = _read_foreign(path, own.keys())
    if optimizer and of_optimizer is None:
        raise CheckpointError(
            f"{path} has no state of an optimizer",
            remedy="remove optimizer=True; or give the folder that trainer.save returned, if it wrote this file",
        )
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
        shared["optimizer"] = by_name = _by_name(of_optimizer, named["optimizer"].shared_state(), path)
        for name, entry in by_name["state"].items():
            by_name["state"][name] = {key: divided_as(value, own[name]) for key, value in entry.items()}
    return Saved(model, shared, {}, same_job=True, source=str(path), path=""), rest


def _with_options(saved: Mapping[str, Any], own: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a saved optimizer with the options of this one."""
    if (saved.get("kind", own["kind"]), len(saved["groups"])) != (own["kind"], len(own["groups"])):
        return dict(saved)  # which is refused
    groups = []
    for theirs, ours in zip(saved["groups"], own["groups"], strict=True):
        if needed := [key for key in _NEEDS_STATE if ours.get(key) and not theirs.get(key)]:
            raise CheckpointError(
                f"{source} has no optimizer state for {needed[0]}={ours[needed[0]]}",
                why=f"the optimizer that was saved had {needed[0]}={theirs.get(needed[0])}",
                remedy="give the optimizer that value, or load the model without optimizer=True",
            )
        if ours.get("t_total", -1) != -1:
            raise CheckpointError(
                f"the optimizer has a schedule of its own, t_total={ours['t_total']}",
                why="it is counted by the state of the optimizer, so it would not begin new",
                remedy="load the model without optimizer=True; or remove t_total, and give the trainer a scheduler=",
            )
        groups.append({**ours, "params": theirs["params"]})
    return {**saved, "groups": groups}


def _by_name(state: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return an optimizer's `state_dict` under the names of its parameters, which it numbers in the order of groups."""
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
            | {"params": [name_of[number] for number in group["params"]]}
            for group, own_group in zip(groups, own["groups"], strict=True)
        ],
        "state": {name_of[number]: entry for number, entry in state["state"].items() if number in name_of},
    }


def _read_foreign(path: Path, names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """Return the `state_dict` of the model, that of the optimizer if it was saved, and the rest; see `Trainer.load`.

    Prefixes of wrappers (`module.`, `_orig_mod.`, the attribute of a LightningModule) are removed from the saved names.
    """
    if not path.exists():
        near = nearest(path.name, (beside.name for beside in path.parent.glob("*")))
        raise CheckpointError(
            f"there is no file or folder {path}",
            why=f"seen from {Path.cwd()}",
            remedy=f"did you mean {path.with_name(near)}?" if near else "correct the path",
        )
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
        raise CheckpointError(
            f"the optimizer in {path} is not the state_dict of one optimizer",
            remedy="load it yourself by optimizer.load_state_dict",
        )
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
            available=store.beneath(folder),
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
        return load_file(path)
    with path.open("rb") as file:
        begin = file.read(8)
    if not begin.startswith((b"PK", b"\x80")):  # torch's archive, or a pickle
        raise CheckpointError(
            f"{path} is not a file of torch.save",
            why=f"it begins with {begin!r}",
            remedy="give a file of torch.save, or one of safetensors whose name ends in .safetensors",
        )
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
