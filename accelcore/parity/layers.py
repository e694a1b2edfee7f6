"""Two ways of running one model, side by side: the first module where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors

__all__ = ["ROUNDING", "LayerDifference", "Parts", "compare_layers", "keep_layers", "same_random_numbers"]

ROUNDING = 8.0
"""Units of rounding within which two dtypes agree at a module: rounding adds up over the layers before it."""

Parts = Mapping[tuple[str, str], list[Tensor]]
"""Values of each call, on the host, by a module's name and `"input 0"` or `"output 0"`, in the order of first calls."""


@dataclass(frozen=True)
class LayerDifference:
    """Difference of the two ways at one input or output of a module.

    Attributes:
        module: its name as in `model.named_modules()`; `""` for the model itself.
        item: `"input 0"`, `"output 0"` and so on.
        equal: whether all values are the same.
        ratio: root mean square of the difference, in units of rounding: the epsilon of the coarsest floating-point
            dtype up to here, times the root mean square of the first way's values.
    """

    module: str
    item: str
    equal: bool
    ratio: float

    @property
    def computed_by(self) -> str:
        """The module that computed what differs: an input is computed by the code of the module around."""
        return self.module if self.item.startswith("output") else self.module.rpartition(".")[0]

    @property
    def place(self) -> str:
        """The item, and for an input its module, too."""
        return self.item if self.item.startswith("output") else f"{self.item} of {self.module}"


@contextmanager
def keep_layers(model: nn.Module | None) -> Iterator[Parts]:
    """Keep the floating-point inputs and outputs of each module that is called in this context."""
    parts: dict[tuple[str, str], list[Tensor]] = {}

    def keep(name: str, kind: str, value: object) -> None:
        if not torch.compiler.is_compiling():
            for number, tensor in enumerate(tensors(value)):
                if tensor.is_floating_point():
                    parts.setdefault((name, f"{kind} {number}"), []).append(tensor.detach().cpu().clone())

    def before(name: str) -> Callable[..., None]:
        return lambda module, arguments, options: keep(name, "input", [arguments, options])

    def after(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: keep(name, "output", output)

    hooks = Hooks()
    try:
        for name, module in () if model is None else model.named_modules():
            hooks.add(
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after(name)),
            )
        yield parts
    finally:
        hooks.close()


def compare_layers(mine: Parts, theirs: Parts) -> tuple[list[LayerDifference], bool]:
    """Return the difference at each input and output that both ways have, and whether their dtypes differ anywhere."""
    found: list[LayerDifference] = []
    unit, differ = 0.0, False
    for key, parts in mine.items():
        joined = _joined(parts, theirs.get(key, []))
        if joined is None:
            continue
        dtypes = (parts[0].dtype, theirs[key][0].dtype)
        differ = differ or dtypes[0] != dtypes[1]
        unit = max(unit, *(torch.finfo(dtype).eps for dtype in dtypes))
        a, b = (each.double() for each in joined)
        equal = bool(((a == b) | (a.isnan() & b.isnan())).all())
        apart, size = ((value.square().mean().sqrt().item()) if value.numel() else 0.0 for value in (a - b, a))
        ratio = 0.0 if equal else apart / (unit * size) if size else math.inf
        found.append(LayerDifference(*key, equal, math.inf if math.isnan(ratio) else ratio))
    return found, differ


def _joined(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Join the parts of both ways along the dimension that gives them one shape; None if there is none."""
    if not mine or not theirs:
        return None
    for dim in range(max(1, mine[0].dim())):
        try:
            a, b = (parts[0] if len(parts) == 1 else torch.cat(list(parts), dim) for parts in (mine, theirs))
        except RuntimeError:  # the parts do not fit together along this dimension
            continue
        if a.shape == b.shape:
            return a, b
    return None


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the host and of a device at the end."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(device_type=device.type):
            yield
