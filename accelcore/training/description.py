"""A training described in words, which are the same on all ranks that train the same."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.training.plan import Plan

__all__ = ["describe"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_OWN = ("observers",)  # who listens is each rank's own affair
_BY_KIND = ("loss", "weight", "clip", "scheduler")  # objects of the script's, whose text says nothing


def describe(plan: Plan) -> dict[str, str]:
    """Versions, options, optimizer and model of a training that is prepared, each under its name."""
    backend, options = plan.backend, plan.options
    said = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "accelcore": version("accelcore"),
        "the backend": backend.name + (", emulated" if backend.emulated else ""),
        "the optimizer": getattr(plan.optimizer, "name", type(plan.optimizer).__name__),
    }
    for name, value in options.items():
        if name not in _OWN:
            said[f"the option {name}"] = _kind(value) if name in _BY_KIND else _text(value)
    said |= _groups(plan.optimizer)
    numbers = {id(member): number for number, members in enumerate(plan.groups()) for member in members}
    for name, one in plan.model.named_parameters():
        said[f"the parameter {name}"] = _tensor(one)
        said[f"the group of {name}"] = str(numbers.get(id(one)))
    said |= {f"the buffer {name}": _tensor(one) for name, one in plan.model.named_buffers()}
    return said


def _groups(optimizer: Optimizer) -> Mapping[str, str]:
    return {
        f"group {number} of the optimizer": ", ".join(
            f"{name}={f'{len(value)} tensors' if name == 'params' else _text(value)}"
            for name, value in sorted(group.items())
        )
        for number, group in enumerate(optimizer.param_groups)
    }


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _text(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _tensor(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
