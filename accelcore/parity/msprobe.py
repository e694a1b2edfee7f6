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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import RecordingError
from accelcore.parity.layers import keep_layers
from accelcore.util.text import is_number, is_whole, shown

__all__ = ["DumpDifference", "Statistics", "compare_dump", "read_dump"]

_ENTRY = re.compile(r"Module\.(.+)\.([A-Za-z_]\w*)\.forward\.(\d+)")
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_ROUNDING = 64.0
"""Units of rounding within which statistics agree: sums in another order, over the layers before."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor.

    Attributes:
        dtype: torch's name, such as `"bfloat16"`.
        values: by their names `"Max"`, `"Min"`, `"Mean"` and `"Norm"`; those that the dump has, which are not null.
    """

    dtype: str
    shape: tuple[int, ...]
    values: dict[str, float]


@dataclass(frozen=True)
class DumpDifference:
    """The first place where a model parts from a dump.

    Attributes:
        module: its name as in `model.named_modules()`.
        call: how often the module was called before.
        item: `"input 0"` or `"output 0"`, and so on.
        statistic: `"shape"`, `"Max"`, `"Min"`, `"Mean"` or `"Norm"`.
        recorded, found: the two values.
        ratio: their difference in units of rounding; infinite for a shape.
    """

    module: str
    call: int
    item: str
    statistic: str
    recorded: Any
    found: Any
    ratio: float


Dump = Mapping[tuple[str, int, str], Statistics]
"""Statistics by module name, number of the call, and `"input 0"` or `"output 0"`, in the order of the file."""


def read_dump(path: str | Path) -> Dump:
    """Return the statistics of modules in a `dump.json`.

    Raises:
        RecordingError: the file cannot be read, is not such a dump, or has no module.
    """
    try:
        dump = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordingError(
            f"{path} cannot be read", why=str(error), remedy="give a dump.json that msprobe has written to its end"
        ) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("data"), dict):
        raise RecordingError(f"{path} is not a dump of msprobe", why="it has no object 'data'")
    found: dict[tuple[str, int, str], Statistics] = {}
    for name, entry in dump["data"].items():
        match = _ENTRY.fullmatch(name)
        if match is None:
            continue
        if not isinstance(entry, dict):
            raise _damaged(path, name, "it is not an object")
        for key, kind in (("input_args", "input"), ("output", "output")):
            listed = entry.get(key, [])
            listed = listed if isinstance(listed, list) else [listed]
            given = [each for each in listed if isinstance(each, dict) and each.get("type") == "torch.Tensor"]
            for number, each in enumerate(given):
                found[match[1], int(match[3]), f"{kind} {number}"] = _statistics(path, name, each)
    if not found:
        raise RecordingError(
            f"{path} has no module", why=f"its level is {dump.get('level')!r}", remedy="dump with level L0 or mix"
        )
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
            remedy="give the model that was dumped: names are those of model.named_modules()",
        )
    unit = 0.0
    for key, recorded in dump.items():
        here = found.get(key)
        if here is None:
            continue
        if here.shape != recorded.shape:
            return DumpDifference(*key, "shape", recorded.shape, here.shape, math.inf)
        unit = max(unit, *(torch.finfo(getattr(torch, each.dtype)).eps for each in (recorded, here)))
        largest = max(abs(recorded.values.get(name, 0.0)) for name in ("Max", "Min"))
        for name in [each for each in _STATISTICS if each in recorded.values and each in here.values]:
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
    return Statistics(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), found)


def _statistics(path: str | Path, name: str, given: Mapping[str, Any]) -> Statistics:
    dtype = str(given.get("dtype")).removeprefix("torch.")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise _damaged(path, name, f"{shown(str(given.get('dtype')))} is not a dtype of torch")
    shape = given.get("shape")
    if not isinstance(shape, list) or not all(is_whole(size) for size in shape):
        raise _damaged(path, name, f"{shape!r} is not a shape")
    numbers = {each: given[each] for each in _STATISTICS if given.get(each) is not None}
    if not all(is_number(each) for each in numbers.values()):
        raise _damaged(path, name, f"{numbers} are not {', '.join(_STATISTICS)}")
    if not getattr(torch, dtype).is_floating_point:
        dtype, numbers = "float32", {}
    return Statistics(dtype, tuple(shape), {each: float(number) for each, number in numbers.items()})


def _damaged(path: str | Path, name: str, why: str) -> RecordingError:
    return RecordingError(f"the entry {shown(name)} of {path} is damaged", why=why, remedy="dump again")
