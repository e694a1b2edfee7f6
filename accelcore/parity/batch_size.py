"""Whether a model computes the same for a row alone as for the row in a batch: `accelcore replay --batch 1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.parity.layers import ROUNDING, LayerDifference, Parts, compare_layers, keep_layers, same_random_numbers
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.result import Result
from accelcore.util.containers import tensors, with_tensors

__all__ = ["compare_batch_sizes", "read_result"]


def compare_batch_sizes(model: nn.Module, given: tuple[Any, Any], size: int, *, rank: int) -> Result:
    """Run a model on a batch, and again on `size` rows of it at a time; name the first module that parts.

    It runs in evaluation mode, because dropout and BatchNorm depend on the batch otherwise.

    Args:
        given: the model's arguments. Tensors as long as the first one are divided; others are given whole.

    Raises:
        ConfigurationError: the batch has no more than `size` rows.
        UnsupportedError: no module's values have a dimension of rows.
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
    first = next((each for each in layers if not each.equal), None)
    if first is None:
        note = f"each row gives the same bits in a batch of {count} as in one of {size}"
        return Result(agrees=True, steps=1, exact=True, notes=(note,))
    return Result(
        agrees=False, steps=1, exact=True, step=1, rank=rank, phase="batch size",
        module=first.computed_by, item=first.place, is_cause=True, ratio=first.ratio,
        next="a kernel chooses its order of sums by the size of the batch, or the module mixes rows",
        notes=(_beyond_rounding(layers),),
    )  # fmt: skip


def read_result(folder: Path) -> Result:
    """Return the result that a replay of `batch=` has left in its recording: of the first rank that parts."""
    found = [Result(**Reader(each).facts["result"]) for each in ranks_of(folder).values()]
    return next((each for each in found if not each.agrees), found[0])


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


def _beyond_rounding(layers: list[LayerDifference]) -> str:
    beyond = next((each for each in layers if each.ratio > ROUNDING), None)
    if beyond is None:
        return f"no module is apart by more than {ROUNDING:g} units of rounding"
    name = beyond.computed_by or "the model itself"
    return f"the first by more than {ROUNDING:g} units of rounding is {name}, {beyond.place}: {beyond.ratio:.3g} units"
