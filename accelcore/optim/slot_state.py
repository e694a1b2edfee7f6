"""Optimizer state seen by parameter, and the same state where an optimizer keeps it: by what it updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.optim.formulas import Formula
from accelcore.optim.runs import Run, Slot
from accelcore.optim.shards import as_shard, shard, shard_of

__all__ = ["COUNTERS", "Entry", "by_parameter", "divide", "pour"]

Entry = dict[str, Any]

COUNTERS = ("step", "eta", "mu", "mu_product")
"""State of torch's optimizers that belongs to a parameter as a whole, a scalar, and not to its elements."""


def by_parameter(runs: Iterable[Run], state: Mapping[Tensor, Entry]) -> dict[Tensor, Entry]:
    """State under the model's parameters, with torch's keys. What belongs to elements are views, in their shape."""
    entries: dict[Tensor, Entry] = {}
    for run in runs:
        entry = state.get(run.value)
        if not entry:
            continue
        columns = {key: _seen(run, key, value) for key, value in entry.items()}
        for number, slot in enumerate(run.slots):
            entries[slot.parameter] = {key: column[number] for key, column in columns.items()}
    return entries


def pour(entries: Mapping[Tensor, Entry], runs: Sequence[Run], optimizer: Optimizer) -> list[Run]:
    """Put state that is held by parameter into an optimizer of these runs.

    Returns:
        The runs, split where parameters that lie side by side have another history.
    """
    divided = []
    for whole in runs:
        histories = [_history(entries.get(slot.parameter, {})) for slot in whole.slots]
        edges = [n for n in range(1, len(histories)) if histories[n] != histories[n - 1]]
        for run in whole.split([whole.first + n for n in edges]) if edges else [whole]:
            divided.append(run)
            if histories[run.first - whole.first]:
                group = optimizer.param_groups[run.group]
                formula = optimizer if isinstance(optimizer, Formula) else None
                counts_there = group.get("fused") or group.get("capturable") or (formula and formula.counts_on_device)
                # Where each step is counted: by a kernel on the device, else on the host, which need not wait for it.
                place = run.value.device if counts_there else torch.device("cpu")
                dtype = formula.state_dtype(group, run.value) if formula else run.value.dtype
                own = [_own(entries[slot.parameter], slot) for slot in run.slots]
                optimizer.state[run.value] = _poured(own, run, dtype, place)
    return divided


def divide(run: Run, parts: Sequence[Run], state: MutableMapping[Tensor, Entry]) -> None:
    """Let each part of a run have its part of the state, and counts of its own."""
    entry = state.pop(run.value, None)
    if entry:
        for part in parts:
            state[part.value] = {
                key: (run.cut(value, part) if value.shape == run.value.shape else value.clone())
                if isinstance(value, Tensor)
                else value
                for key, value in entry.items()
            }


def _seen(run: Run, key: str, value: Any) -> Sequence[Any]:
    if run.memory is None and isinstance(value, Tensor) and key not in COUNTERS:
        return [as_shard(value, slot.parameter) for slot in run.slots]
    if run.memory is None or not isinstance(value, Tensor):
        return [value] * len(run.slots)
    if value.shape == run.value.shape:
        return run.parts(value)
    return value.expand(len(run.slots), *value.shape).clone().unbind()  # each its own: torch counts them up one by one


def _history(entry: Entry) -> dict[str, Any]:
    """What parameters must have in common to be updated as one: the same keys, and equal counts."""
    return {
        key: (value.item() if isinstance(value, Tensor) else value) if key in COUNTERS else None
        for key, value in entry.items()
    }


def _own(entry: Entry, slot: Slot) -> Entry:
    """What of a parameter's state belongs to what is trained here: where that is a shard, its part."""
    return {
        key: shard_of(value, slot.parameter) if isinstance(value, Tensor) and key not in COUNTERS else value
        for key, value in entry.items()
    }


def _poured(entries: Sequence[Entry], run: Run, dtype: torch.dtype, place: torch.device) -> Entry:
    """The entry of a run, whose state is kept in `dtype`, and its number of steps at `place`."""
    poured: Entry = {}
    for key, value in entries[0].items():
        if key == "step":
            poured[key] = torch.as_tensor(value).detach().to(place, torch.float32, copy=True)
        elif not isinstance(value, Tensor):
            poured[key] = value
        elif key in COUNTERS or value.shape != shard(run.slots[0].trained).shape:
            poured[key] = value.detach().to(run.value.device, copy=True)
        else:
            # Dense in a file, or of another precision: it takes the layout of what is updated.
            tensor = torch.zeros_like(run.value, dtype=dtype if value.is_floating_point() else value.dtype)
            torch._foreach_copy_(run.parts(tensor), [entry[key] for entry in entries])
            poured[key] = tensor
    return poured
