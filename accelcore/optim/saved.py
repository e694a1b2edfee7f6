"""Reading a saved state of an optimizer: by torch, by torch_npu, by apex, or by this package."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from accelcore.optim.slot_state import Entry

__all__ = ["SWITCHES", "read_options", "read_state"]

logger = logging.getLogger("accelcore")

SWITCHES = ("foreach", "fused", "capturable", "differentiable", "param_names", "state_dtype")
"""Options of a group that say how an update is computed, not what it computes: loading state leaves them alone."""


def read_state(saved: Mapping[str, Any], groups: Sequence[dict[str, Any]], *, shaped: bool) -> dict[Tensor, Entry]:
    """The state in a `state_dict` under the parameters of these groups, sharing no tensor with it.

    Args:
        saved: the `state_dict`.
        groups: the parameter groups of the optimizer that takes it over.
        shaped: whether every tensor in it, but the counts, must have the shape of its parameter.

    Raises:
        ValueError: it has other groups, or other parameters in them.
    """
    saved_groups = saved["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise ValueError("the state has other parameter groups, or groups of another size, than this optimizer")
    parameters = chain.from_iterable(group["params"] for group in groups)
    numbers = [(number, group) for group in saved_groups for number in group["params"]]
    entries: dict[Tensor, Entry] = {}
    for (number, group), parameter in zip(numbers, parameters, strict=True):
        if number in saved["state"]:
            entries[parameter] = _as_torch_writes(saved["state"][number], group)
            if shaped:
                _check_shapes(parameter, entries[parameter])
    if any(map(_lacks_its_count, entries.values())):
        logger.warning("the state has moments, and counts no updates: a schedule starts over")
    return entries


def read_options(saved: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Give groups the hyperparameters in a `state_dict`."""
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key not in ("params", "step", *SWITCHES)})


def _as_torch_writes(entry: Entry, group: Mapping[str, Any]) -> Entry:
    """Steps are a plain number in torch_npu and older versions of torch; NVIDIA's apex counts them in the group."""
    taken = {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in entry.items()}
    steps = taken.get("step", group.get("step") if "exp_avg" in taken else None)
    if isinstance(steps, int | float):
        taken["step"] = torch.tensor(steps, dtype=torch.float32)
    return taken


def _lacks_its_count(entry: Entry) -> bool:
    return "exp_avg" in entry and not entry.get("step", 1) and bool(entry["exp_avg"].any())


def _check_shapes(parameter: Tensor, entry: Entry) -> None:
    """Raise ValueError for state of another parameter's shape."""
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
            raise ValueError(
                f"the state {key!r} has shape {tuple(value.shape)}, and its parameter {tuple(parameter.shape)}"
            )
