"""Results that are too large for a device of 64 MiB, by how they are made."""

import resource

import torch
import torch_npu  # noqa: F401  # where torch does not load it by itself
from torch.nn import functional

_GIGABYTES = {
    "zeros": lambda row, column: torch.zeros(2**28, device="npu"),
    "tera": lambda row, column: torch.zeros(2**40, device="npu"),
    "random": lambda row, column: torch.randn(2**40, device="npu"),
    "range": lambda row, column: torch.arange(2**40, device="npu"),
    "sum": lambda row, column: row + column,
    "product": lambda row, column: column @ row,
    "repeated": lambda row, column: row.repeat(2**14, 1),
    "expanded": lambda row, column: row.expand(2**14, 2**14).clone(),
    "joined": lambda row, column: torch.cat([row] * 2**14),
    "one hot": lambda row, column: functional.one_hot(column.long().flatten(), 2**14),
    "looked up": lambda row, column: functional.embedding(column.long().flatten() - 1, row),
    "distances": lambda row, column: torch.cdist(column, column),
}


def host_memory_of_refusals():
    """What each is refused with, and by how many MiB the process grew in all."""
    row, column = torch.ones(1, 2**14, device="npu"), torch.ones(2**14, 1, device="npu")
    torch.ones(2, device="meta") + 1  # loads what finds shapes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = {}
    for name, make in _GIGABYTES.items():
        try:
            make(row, column)
            told[name] = "nothing"
        except (RuntimeError, MemoryError) as error:
            told[name] = type(error).__name__
    return told, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
