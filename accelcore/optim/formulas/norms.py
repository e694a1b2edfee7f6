"""The norm of many tensors together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["norm_of"]


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all elements, in float32 or what is more exact, on the first one's device; 0 of none."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    if not norms:
        return torch.zeros(())
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return together
