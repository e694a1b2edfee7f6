"""Optimizer state by parameter, in a `state_dict`, and by run, in an engine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import logger
from accelcore.optim.engine import as_engine
from accelcore.optim.flat.memory import Run, Slot
from accelcore.optim.shards import as_shard, shard_of, to_local

Entry = dict[str, Any]

COUNTERS = ("step", "eta", "mu", "mu_product")
"""Scalars in the state of torch's optimizers: one for a parameter, not for each of its elements."""

SWITCHES = ("foreach", "fused", "capturable", "differentiable", "param_names", "state_dtype")
"""Options of a group that choose an implementation, not a result. They are not loaded."""


def by_parameter(runs: Iterable[Run], state: Mapping[Tensor, Entry]) -> dict[Tensor, Entry]:
    """Return the state by parameter, with torch's keys. Tensors of the parameter's shape are views."""
    entries: dict[Tensor, Entry] = {}
    for run in runs:
        entry = state.get(run.value)
        if not entry:
            continue
        columns = {key: _by_slot(run, key, value) for key, value in entry.items()}
        for number, slot in enumerate(run.slots):
            entries[slot.parameter] = {key: column[number] for key, column in columns.items()}
    return entries


def load_state(entries: Mapping[Tensor, Entry], runs: Sequence[Run], optimizer: Optimizer) -> list[Run]:
    """Load state by parameter into an optimizer. Return its runs, split between parameters with other histories."""
    engine = as_engine(optimizer)
    divided = []
    for whole in runs:
        histories = [_history(entries.get(slot.parameter, {})) for slot in whole.slots]
        for run in whole.split_by(histories):
            divided.append(run)
            if histories[run.first - whole.first]:
                group = optimizer.param_groups[run.group]
                counts_there = group.get("fused") or group.get("capturable") or engine.counts_on_device
                # The host counts unless a kernel does on the device: then the host need not wait for it.
                place = run.value.device if counts_there else torch.device("cpu")
                own = [_own(entries[slot.parameter], slot) for slot in run.slots]
                optimizer.state[run.value] = _of_run(own, run, engine.state_dtype(group, run.value), place)
    return divided


def divide(run: Run, parts: Sequence[Run], state: MutableMapping[Tensor, Entry]) -> None:
    """Divide the state of a run among its parts. Each part gets counters of its own."""
    entry = state.pop(run.value, None)
    if entry:
        for part in parts:
            state[part.value] = {
                key: (run.cut(value, part.first, part.last) if value.shape == run.value.shape else value.clone())
                if isinstance(value, Tensor)
                else value
                for key, value in entry.items()
            }


def read_state(saved: Mapping[str, Any], groups: Sequence[dict[str, Any]], *, shaped: bool) -> dict[Tensor, Entry]:
    """Return a copy of the state in a `state_dict`, by parameter of these groups; raise ValueError if it does not fit.

    If `shaped`, every tensor in it, except counters, must have the shape of its parameter.
    """
    saved_groups = saved["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise ValueError("the saved state and this optimizer differ in the number or sizes of their parameter groups")
    parameters = chain.from_iterable(group["params"] for group in groups)
    numbers = [(number, group) for group in saved_groups for number in group["params"]]
    entries: dict[Tensor, Entry] = {}
    for (number, group), parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            entries[parameter] = _as_torch_writes(saved["state"][number], group)
            for key, value in entries[parameter].items() if shaped else ():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, but its parameter has {tuple(parameter.shape)}"
                    raise ValueError(f"the state {key!r} has shape {shapes}")
    if any("exp_avg" in e and not e.get("step", 1) and bool(e["exp_avg"].any()) for e in entries.values()):
        logger.warning("the saved state has moments but counts no updates: a schedule starts over")
    return entries


def _by_slot(run: Run, key: str, value: Any) -> Sequence[Any]:
    if run.memory is None and isinstance(value, Tensor) and key not in COUNTERS:
        return [as_shard(value, slot.parameter) for slot in run.slots]
    if run.memory is None or not isinstance(value, Tensor):
        return [value] * len(run.slots)
    if value.shape == run.value.shape:
        return run.parts(value)
    # A tensor each: torch increments them one by one.
    return value.expand(len(run.slots), *value.shape).clone().unbind()


def _history(entry: Entry) -> dict[str, Any]:
    """Return what parameters must have in common to be updated as one: keys and equal counters."""
    return {
        key: (value.item() if isinstance(value, Tensor) else value) if key in COUNTERS else None
        for key, value in entry.items()
    }


def _own(entry: Entry, slot: Slot) -> Entry:
    """Return a parameter's state; only this rank's shard if the parameter is divided."""
    return {
        key: shard_of(value, slot.parameter) if isinstance(value, Tensor) and key not in COUNTERS else value
        for key, value in entry.items()
    }


def _of_run(entries: Sequence[Entry], run: Run, dtype: torch.dtype, place: torch.device) -> Entry:
    """Join the states of a run's parameters, in `dtype`, with the number of steps on `place`."""
    entry: Entry = {}
    for key, value in entries[0].items():
        if key == "step":
            entry[key] = torch.as_tensor(value).detach().to(place, torch.float32, copy=True)
        elif not isinstance(value, Tensor):
            entry[key] = value
        elif key in COUNTERS or value.shape != to_local(run.slots[0].trained).shape:
            entry[key] = value.detach().to(run.value.device, copy=True)
        else:
            # It may have other strides or another precision in a file: use the layout of the run.
            tensor = torch.zeros_like(run.value, dtype=dtype if value.is_floating_point() else value.dtype)
            torch._foreach_copy_(run.parts(tensor), [entry[key] for entry in entries])
            entry[key] = tensor
    return entry


def _as_torch_writes(entry: Entry, group: Mapping[str, Any]) -> Entry:
    """Return a copy with torch's `step`: a plain number in torch_npu and old torch, in the group in NVIDIA's apex."""
    taken = {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in entry.items()}
    steps = taken.get("step", group.get("step") if "exp_avg" in taken else None)
    if isinstance(steps, int | float):
        taken["step"] = torch.tensor(steps, dtype=torch.float32)
    return taken
