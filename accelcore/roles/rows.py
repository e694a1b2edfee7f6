"""What a rank gives to be gathered, as one tensor of rows; or why it cannot be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.wording import kind_of

__all__ = ["Kind", "as_rows", "empty_rows", "kind_of_rows", "nothing"]

Kind = tuple[str, list[int], str]
"""What the rows of all ranks have in common: dtype, shape of a row, kind of device."""


def as_rows(given: Any) -> tuple[Tensor | None, ConfigurationError | None]:
    """The rows of a tensor or of a list of tensors, None of an empty list; and the refusal of anything else."""
    parts = given if isinstance(given, list | tuple) else [given]
    for part in parts:
        if not isinstance(part, Tensor):
            what = f"a list with {kind_of(part)} in it" if part is not given else kind_of(given)
            return None, ConfigurationError(
                f"{what} cannot be gathered: it is no tensor, and no list of tensors",
                remedy="make a tensor of it, as by torch.tensor(...); of a number, job.mean(...) is the mean over "
                "ranks; job.gather_objects(...) takes other values",
            )
    rows = [part.detach().reshape(1) if part.dim() == 0 else part.detach() for part in parts]
    kinds = {str(kind_of_rows(part)): part for part in rows}
    if len(kinds) > 1:
        first, second, *_ = (f"{part.dtype} of shape {tuple(part.shape)}" for part in kinds.values())
        return None, ConfigurationError(
            f"a list cannot be gathered whose tensors are of different kinds: {first}, and {second}",
            remedy="gather tensors that differ in the number of rows only; what is of another kind, by itself",
        )
    return (torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None), None


def kind_of_rows(rows: Tensor) -> Kind:
    """What ranks compare, and tell one that has no rows."""
    return str(rows.dtype).removeprefix("torch."), list(rows.shape[1:]), rows.device.type


def empty_rows(kind: Kind) -> Tensor:
    """No rows, of this kind."""
    dtype, shape, device = kind
    return torch.empty((0, *shape), dtype=getattr(torch, dtype), device=device)


def nothing() -> ConfigurationError:
    """The refusal of lists that are empty on all ranks."""
    return ConfigurationError(
        "there is nothing to gather: no rank has any rows",
        why="the lists of all ranks are empty, and do not tell what kind of rows they would hold",
        remedy="see whether there is any data to evaluate on",
    )
