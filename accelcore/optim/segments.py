"""Sums over the parameters of a run, or over the channels of each, as fast for thousands of them as for one.

A run is one 1-D tensor. A kernel for each of its parameters would be slow, and an atomic sum depends on the order in
which a device adds. So sums are trees: a gather that lines up the members of each segment in rows, and a sum of each
row, again and again until one number is left of each segment. How often that is depends on the longest segment alone:
the tree has a level for each factor of 128 in its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelcore.optim.runs import Run

__all__ = ["Channels", "Rows", "Segments", "Whole", "channels_of", "parameters_of"]

_WIDTH = 128
"""The most numbers that a level of the tree adds up in a row; also the most elements of a leaf."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments of a 1-D tensor lie in it.

    Attributes:
        grain: elements of a leaf, which belong together; the tensor is as many leaves, each of one segment or of none.
        owners: int32, for each leaf the number of its segment, or the number of segments where it has none.
        levels: int32, matrices of numbers: which of the sums so far each row adds up; one past the last is a zero.
    """

    grain: int
    owners: Tensor
    levels: Sequence[Tensor]

    @property
    def structure(self) -> tuple[int, ...]:
        """What a compiled kernel is made for: all but how many there are."""
        return self.grain, *(level.shape[1] for level in self.levels)

    def sum(self, elements: Tensor) -> Tensor:
        """The sum over each segment, along the last dimension."""
        sums = _rows(elements, self.grain).sum(-1) if self.grain > 1 else elements
        for level in self.levels:
            sums = _rows(pad(sums, (0, 1)).index_select(-1, level.flatten()), level.shape[1]).sum(-1)
        return sums

    def norm(self, elements: Tensor) -> Tensor:
        """The L2 norm of each segment."""
        return self.sum(elements * elements).sqrt()

    def multiply(self, elements: Tensor, factors: Tensor, *, elsewhere: float) -> Tensor:
        """The elements, each multiplied by the factor of its segment; by `elsewhere` where it has none."""
        spread = pad(factors, (0, 1), value=elsewhere).index_select(0, self.owners)
        return elements * spread if self.grain == 1 else (_rows(elements, self.grain) * spread.unsqueeze(1)).view(-1)

    def spread(self, values: Tensor) -> Tensor:
        """The value of each leaf's segment; where the leaves are what was summed over other segments before."""
        return values.index_select(0, self.owners)


@dataclass(frozen=True)
class Whole:
    """Counterpart of `Segments` for a tensor that is one segment. Sums are along the last dimension."""

    def sum(self, elements: Tensor) -> Tensor:
        return elements.sum(-1, keepdim=True)

    def norm(self, elements: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(elements)
        return norm

    def multiply(self, elements: Tensor, factors: Tensor, *, elsewhere: float) -> Tensor:
        return elements * factors

    def spread(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class Rows:
    """Counterpart of `Segments` for a tensor whose rows, by its first dimension, are the segments."""

    rows: int

    def sum(self, elements: Tensor) -> Tensor:
        return elements.reshape(self.rows, -1).sum(-1)

    def multiply(self, elements: Tensor, factors: Tensor, *, elsewhere: float) -> Tensor:
        return elements * factors.view(-1, *[1] * (elements.dim() - 1))


class Channels(NamedTuple):
    """Channels of parameters with several dimensions: the slices along the first dimension.

    Attributes:
        segments: the channels, in the run or parameter.
        parameters: the parameters, in the list of all channels.
        channel_roots: for each channel, 1 / √(its elements).
        parameter_roots: for each parameter, 1 / √(its elements).
    """

    segments: Segments | Rows
    parameters: Segments | Whole
    channel_roots: Tensor | float
    parameter_roots: Tensor | float

    @property
    def structure(self) -> tuple[Any, ...]:
        """Return what a compiled kernel is specialised for: everything but the numbers of segments."""
        return tuple(getattr(part, "structure", None) for part in (self.segments, self.parameters))


def parameters_of(run: Run | Tensor) -> Segments | Whole:
    """Return the parameters of a run of flat memory, or the one parameter."""
    if isinstance(run, Tensor):
        return Whole()
    begins, size = _begins(run), run.value.numel()
    grain = math.gcd(_WIDTH, size, *begins)  # memory is aligned, and gaps are zero
    members = [torch.arange(begin // grain, end // grain)[None] for begin, end in pairwise([*begins, size])]
    return _segments(members, size // grain, grain, run.value.device)


def channels_of(run: Run | Tensor) -> Channels | None:
    """Return the channels of the parameters with elements and two dimensions or more; None if there are none.

    They take about 8 bytes a leaf. A leaf is one element, unless all channels begin at multiples of a power of 2.
    """
    if isinstance(run, Tensor):
        if run.dim() < 2 or not run.numel():
            return None
        rows = run.shape[0]
        return Channels(Rows(rows), Whole(), (run.numel() // rows) ** -0.5, run.numel() ** -0.5)
    parts = [
        (begin, part)
        for begin, part in zip(_begins(run), run.parts(run.value), strict=True)
        if part.dim() > 1 and part.numel()
    ]
    if not parts:
        return None
    # A channel of a dense tensor is in pieces as long as the first dimension's stride, between those of the others.
    lengths = [part.stride(0) if part.shape[0] > 1 else part.numel() for _, part in parts]
    grain = math.gcd(_WIDTH, run.value.numel(), *(begin for begin, _ in parts), *lengths)
    members, numbers, count = [], [], 0
    for (begin, part), length in zip(parts, lengths, strict=True):
        leaves = torch.arange(begin // grain, (begin + part.numel()) // grain)
        members.append(leaves.view(-1, part.shape[0], length // grain).transpose(0, 1).flatten(1))
        numbers.append(torch.arange(count, count + part.shape[0])[None])
        count += part.shape[0]
    device, dtype = run.value.device, torch.promote_types(run.value.dtype, torch.float32)
    roots = [torch.full((part.shape[0],), (part.numel() // part.shape[0]) ** -0.5, dtype=dtype) for _, part in parts]
    return Channels(
        _segments(members, run.value.numel() // grain, grain, device),
        _segments(numbers, count, 1, device),
        torch.cat(roots).to(device),
        torch.tensor([part.numel() ** -0.5 for _, part in parts], dtype=dtype).to(device),
    )


def _rows(tensor: Tensor, width: int) -> Tensor:
    """The last dimension in rows of this many."""
    return tensor.view(*tensor.shape[:-1], -1, width)


def _begins(run: Run) -> list[int]:
    """Where each parameter of a run begins in it."""
    assert run.memory is not None
    offsets = run.memory.layout.offsets
    return [offset - offsets[run.first] for offset in offsets[run.first : run.last]]


def _segments(members: Sequence[Tensor], leaves: int, grain: int, device: torch.device) -> Segments:
    """Segments from their members: matrices of the numbers of leaves, a row for each segment."""
    count = sum(len(rows) for rows in members)
    owners = torch.full((leaves,), count, dtype=torch.int32)
    first = 0
    for rows in members:
        owners[rows] = torch.arange(first, first + len(rows), dtype=torch.int32)[:, None]
        first += len(rows)
    levels: list[Tensor] = []
    size = leaves
    while not levels or any(rows.shape[1] > 1 for rows in members):
        longest = max(rows.shape[1] for rows in members)
        width = min(_WIDTH, 1 << max(longest - 1, 0).bit_length())
        members = [_in_rows(rows, width, missing=size) for rows in members]
        levels.append(torch.cat([rows.reshape(-1, width) for rows in members]).to(device, torch.int32))
        size, members = _numbered([(len(rows), rows.shape[1] // width) for rows in members])
    return Segments(grain, owners.to(device), levels)


def _in_rows(members: Tensor, width: int, *, missing: int) -> Tensor:
    """Each segment's members, filled up to whole rows, one at least."""
    length = members.shape[1]
    return pad(members, (0, max(-(-length // width), 1) * width - length), value=missing)


def _numbered(shapes: Sequence[tuple[int, int]]) -> tuple[int, list[Tensor]]:
    """Matrices of these shapes, of the numbers from 0 on, and how many there are."""
    size, numbered = 0, []
    for segments, rows in shapes:
        numbered.append(torch.arange(size, size + segments * rows).view(segments, rows))
        size += segments * rows
    return size, numbered
