"""Norms: rounded once. The CPU adds one value after the other in float32, which no device does, and is off by more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["OPERATORS"]


def _norm(
    self: Tensor,
    ord: float | None = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dtype is not None and torch.promote_types(self.dtype, dtype) != dtype:
        return torch.linalg.vector_norm(self, 2, dtype=dtype)  # which refuses it
    exact = torch.linalg.vector_norm(self.double(), 2 if ord is None else ord, dim or None, keepdim)
    return exact.to(dtype or self.dtype)


def _norms(tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [_norm(tensor, ord, dtype=dtype) for tensor in tensors]


OPERATORS: dict[str, Callable[..., Any]] = {"_foreach_norm": _norms, "linalg_vector_norm": _norm, "norm": _norm}
