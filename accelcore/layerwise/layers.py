"""Two ways of running one model, side by side: the first module where they diverge.

`compare_batch_sizes` runs a batch whole and some rows at a time: `accelcore replay --batch 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors, with_tensors
from accelcore.util.rounding import distance, unit_of

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

    def keep(name: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *given: object) -> None:  # arguments and options, or arguments and output
            if torch.compiler.is_compiling():
                return
            for number, tensor in enumerate(tensors(given if kind == "input" else given[-1])):
                if tensor.is_floating_point():
                    parts.setdefault((name, f"{kind} {number}"), []).append(tensor.detach().cpu().clone())

        return hook

    with Hooks() as hooks:
        for name, module in () if model is None else model.named_modules():
            hooks.add(
                module.register_forward_pre_hook(keep(name, "input"), with_kwargs=True),
                module.register_forward_hook(keep(name, "output")),
            )
        yield parts


def compare_layers(mine: Parts, theirs: Parts) -> tuple[list[LayerDifference], bool]:
    """Return the difference at each input and output that both ways have, and whether their dtypes differ anywhere."""
    found: list[LayerDifference] = []
    unit, differ = 0.0, False
    for key, parts in mine.items():
        joined = _joined(parts, theirs.get(key, []))
        if joined is None:
            continue
        differ = differ or joined[0].dtype != joined[1].dtype
        unit = max(unit, *(unit_of(each.dtype) for each in joined))
        apart = distance(*(each.double() for each in joined))
        found.append(LayerDifference(*key, apart.equal, apart.ratio(unit)))
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


def same_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the random generators of the host and of a device at its end."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def compare_batch_sizes(model: nn.Module, given: tuple[Any, Any], size: int) -> list[LayerDifference]:
    """Run a model on a batch, and again on `size` rows of it at a time, and compare its layers.

    It runs in evaluation mode, because dropout and BatchNorm depend on the batch otherwise. Of the arguments `given`,
    tensors as long as the first one are divided; others are given whole.
    """
    own = tensors(given)
    count = next((tensor.shape[0] for tensor in own if tensor.dim()), 0)
    if count <= size:
        raise ConfigurationError(
            f"a batch of {count} rows cannot be divided into batches of {size}",
            remedy="give fewer rows, or the script a larger batch",
        )
    divided = [
        with_tensors(
            given, [each[begin : begin + size] if each.dim() and each.shape[0] == count else each for each in own]
        )
        for begin in range(0, count, size)
    ]
    layers, _ = compare_layers(_run(model, [given]), _run(model, divided))
    if not layers:
        raise UnsupportedError(
            "batches of two sizes cannot be compared", why="no module has inputs or outputs with a dimension of rows"
        )
    return layers


def _run(model: nn.Module, batches: list[tuple[Any, Any]]) -> Parts:
    """Run a model on batches in evaluation mode, and leave it and the random generators as they were."""
    modes = {module: module.training for module in model.modules()}
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    try:
        model.eval()
        with torch.no_grad(), same_random_numbers(device), keep_layers(model) as parts:
            for arguments, options in batches:
                model(*arguments, **options)
    finally:
        for module, training in modes.items():
            module.training = training
        torch.clear_autocast_cache()  # it has casts of the weights without their gradients
    return parts
