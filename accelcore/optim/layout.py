"""Where tensors lie in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

__all__ = ["Layout"]

_ALIGNMENT = 512
"""Bytes. What allocators of accelerators align a tensor to, and a multiple of a CPU's cache line."""


class Layout:
    """Where each of several tensors lies in one piece of memory, in elements."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        unit = _ALIGNMENT // tensors[0].element_size()
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [tensor.stride() for tensor in tensors]
        sizes = [-(-tensor.numel() // unit) * unit for tensor in tensors]
        self.offsets = [0, *accumulate(sizes)]
        """Where each begins, and after the last where all end."""

    def views(self, memory: Tensor, first: int = 0, last: int | None = None) -> list[Tensor]:
        """The tensors `first` to `last` (not included) as views of `memory`, which begins with the first of them."""
        begin = self.offsets[first]
        return [
            memory.as_strided(self.shapes[number], self.strides[number], memory.storage_offset() + offset - begin)
            for number, offset in list(enumerate(self.offsets[:-1]))[first:last]
        ]
