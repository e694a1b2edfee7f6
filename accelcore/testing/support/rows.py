"""Operators that reduce or normalize rows, on lengths around the widths of vectors and beyond."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcore.known_faults import KnownFault
from accelcore.testing.support.case import Case
from accelcore.testing.support.found import Found

_LENGTHS = (9, 17, 33, 129, 768, 1025, 4099)
_OF_LOW = 33  # the length that is tried in every dtype

ROWS: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: functional.group_norm(x[None], 3),
    "instance_norm": lambda x: functional.instance_norm(x[None]),
    "batch_norm": lambda x: functional.batch_norm(x.t(), None, None, training=True),
    "normalize": functional.normalize,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(3, device=x.device)),
    "sum": lambda x: x.sum(-1),
    "sum of all": torch.sum,
    "sum of columns": lambda x: x.t().sum(0),
    "mean": lambda x: x.mean(-1),
    "prod": lambda x: (1 + x / x.shape[-1]).prod(-1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x.detach().flip(0)),
    "mse_loss": lambda x: functional.mse_loss(x, x.detach().flip(0)),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "glu": lambda x: functional.glu(torch.cat([x, x.detach().flip(0)], -1)),
    "cumsum": lambda x: x.cumsum(-1),
    "mm": lambda x: x @ x.detach().t(),
}
"""Operators of three rows, by name."""


class _OfRows:
    inplace_variant, supports_out, supports_autograd = None, False, True

    def __init__(self, name: str) -> None:
        self.op = ROWS[name]


def compare_rows(
    device: torch.device, name: str, dtypes: Sequence[torch.dtype], faults: Sequence[KnownFault] = ()
) -> Found:
    """Compare an operator of `ROWS` with float64 on the CPU."""
    found = Found([fault for fault in faults if fault.applies])
    generator = torch.Generator().manual_seed(5)
    for length in _LENGTHS:
        rows = torch.randn(3, length, generator=generator)
        for dtype in dtypes if length == _OF_LOW else (torch.float32,):
            given = rows.to(dtype).requires_grad_()
            Case(found, device, name, _OfRows(name), dtype, ((given,), {}), f"of rows of {length}", False).run()
    return found
