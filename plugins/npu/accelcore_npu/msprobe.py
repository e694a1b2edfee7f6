"""Compare a model with a `dump.json` of msprobe, Ascend's parity tool, at level L0: statistics of modules.

An entry `Module.NAME.CLASS.forward.NUMBER` of its `data` has lists `input_args` and `output`, in which a tensor is an
object with `type`, `dtype`, `shape`, and `Max`, `Min`, `Mean`, `Norm` (the 2-norm), or null where msprobe computes
none. Entries of functions, of backward passes and of gradients are not compared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelcore.errors import RecordingError
from accelcore.layerwise import keep_layers, unit_of
from accelcore.util.text import is_number, is_whole, shown

_ENTRY = re.compile(r"Module\.(.+)\.([A-Za-z_]\w*)\.forward\.(\d+)")
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_ROUNDING = 64.0  # units of rounding within which statistics agree: sums in another order, over the layers before


class Statistics(NamedTuple):
    """Statistics of one tensor; `values` has those that are not null: `"Max"`, `"Min"`, `"Mean"` and `"Norm"`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: dict[str, float]


class DumpDifference(NamedTuple):
    """The first place where a model parts from a dump.

    Attributes:
        call: how often the module was called before.
        item: `"input 0"` or `"output 0"`, and so on.
        statistic: `"shape"`, `"Max"`, `"Min"`, `"Mean"` or `"Norm"`.
        ratio: the difference of `recorded` and `found` in units of rounding; infinite for a shape.
    """

    module: str
    call: int
    item: str
    statistic: str
    recorded: Any
    found: Any
    ratio: float


def read_dump(path: str | Path) -> dict[tuple[str, int, str], Statistics]:
    """Return the statistics in a `dump.json` by module, number of the call, and `"input 0"` or `"output 0"`.

    Raises:
        RecordingError: the file cannot be read, is not such a dump, or has no module.
    """
    found: dict[tuple[str, int, str], Statistics] = {}
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))["data"].items()
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise RecordingError(
            f"{path} cannot be read", why=repr(error), remedy="give a dump.json that msprobe has written to its end"
        ) from error
    for name, entry in entries:
        if match := _ENTRY.fullmatch(name):
            try:
                for key, kind in (("input_args", "input"), ("output", "output")):
                    listed = entry.get(key, [])
                    listed = listed if isinstance(listed, list) else [listed]
                    given = [each for each in listed if isinstance(each, dict) and each.get("type") == "torch.Tensor"]
                    for number, each in enumerate(given):
                        found[match[1], int(match[3]), f"{kind} {number}"] = _statistics(each)
            except (ValueError, AttributeError) as error:
                raise RecordingError(
                    f"the entry {shown(name)} of {path} is damaged", why=str(error), remedy="dump again"
                ) from error
    if not found:
        raise RecordingError(f"{path} has no module", remedy="dump with level L0 or mix")
    return found


def compare_dump(path: str | Path, model: nn.Module, run: Callable[[], object]) -> DumpDifference | None:
    """Return the first place where `run()`, which calls the model, parts from a dump; None if they agree.

    Modules are compared in the order of the dump. The data must be the dump's: the inputs of the first module are
    compared first.

    Raises:
        RecordingError: the dump cannot be read, or none of its modules is called.
    """
    dump = read_dump(path)
    with keep_layers(model) as parts:
        run()
    found = {(name, call, item): _measured(each) for (name, item), of in parts.items() for call, each in enumerate(of)}
    if not dump.keys() & found.keys():
        raise RecordingError(
            f"the model calls no module of {path}",
            available=", ".join(dict.fromkeys(module for module, _, _ in dump)),
            remedy="give the model that was dumped: its names are compared with model.named_modules()",
        )
    unit = 0.0
    for key, recorded in dump.items():
        if (here := found.get(key)) is None:
            continue
        if here.shape != recorded.shape:
            return DumpDifference(*key, "shape", recorded.shape, here.shape, math.inf)
        unit = max(unit, unit_of(recorded.dtype), unit_of(here.dtype))
        largest = max(abs(recorded.values.get(name, 0.0)) for name in ("Max", "Min"))
        for name in [each for each in recorded.values if each in here.values]:
            one, other = recorded.values[name], here.values[name]
            scale = unit * (abs(one) if name == "Norm" else max(largest, abs(one)))
            same = one == other or (math.isnan(one) and math.isnan(other))
            ratio = 0.0 if same else abs(one - other) / scale if scale else math.inf
            if not ratio <= _ROUNDING:
                return DumpDifference(*key, name, one, other, math.inf if math.isnan(ratio) else ratio)
    return None


def _measured(tensor: Tensor) -> Statistics:
    values = tensor.double()
    numbers = (values.max(), values.min(), values.mean(), values.norm()) if tensor.numel() else ()
    found = {name: number.item() for name, number in zip(_STATISTICS, numbers, strict=False)}
    return Statistics(tensor.dtype, tuple(tensor.shape), found)


def _statistics(given: Mapping[str, Any]) -> Statistics:
    dtype, shape = getattr(torch, str(given.get("dtype")).removeprefix("torch."), None), given.get("shape")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{shown(str(given.get('dtype')))} is not a dtype of torch")
    if not isinstance(shape, list) or not all(map(is_whole, shape)):
        raise ValueError(f"{shape!r} is not a shape")
    numbers = {each: given[each] for each in _STATISTICS if dtype.is_floating_point and given.get(each) is not None}
    if not all(map(is_number, numbers.values())):
        raise ValueError(f"{numbers} are not {', '.join(_STATISTICS)}")
    return Statistics(dtype, tuple(shape), numbers)
