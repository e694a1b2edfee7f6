"""Indices of 32 bits: CANN's operators take them, and some of the host's take 64 bits alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

# The position of the indices among the arguments, by operator.
_POSITIONS = {
    "gather": 2,
    "index_copy": 2,
    "index_copy_": 2,
    "index_fill": 2,
    "index_fill_": 2,
    "max_unpool2d": 1,
    "max_unpool3d": 1,
    "multilabel_margin_loss_forward": 1,
    "nll_loss2d_backward": 2,
    "nll_loss2d_forward": 1,
    "nll_loss_backward": 2,
    "nll_loss_forward": 1,
    "put_": 1,
    "take": 1,
}


def with_wide_indices(operator: torch._ops.OpOverload, base: str) -> Callable[..., Any]:
    """Wrap a host operator to take 32-bit indices if the device does; `base` is the operator's bare name."""
    if base not in _POSITIONS:
        return operator
    position = _POSITIONS[base]

    def run(*values: Any, **keywords: Any) -> Any:
        indices = values[position]
        if isinstance(indices, Tensor) and indices.dtype == torch.int32:
            values = (*values[:position], indices.long(), *values[position + 1 :])
        return operator(*values, **keywords)

    return run
