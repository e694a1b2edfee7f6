"""Sums over the parameters of a run, or over their channels, as fast for thousands of them as for one.

A run is one 1-D tensor. A kernel for each of its parameters would be slow, and an atomic sum depends on the order in
which a device adds. So sums are trees. Each level lines up the members of each segment in rows by one `index_select`,
and sums each row, until one number is left of each segment. The longest segment determines the number of levels: one
for each factor of 128 in its length.
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

from accelcore.optim.flat.memory import Run

_WIDTH = 128  # largest length of a row in a level of the tree, and largest number of elements of a block


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of a 1-D tensor, which consists of blocks; each block belongs to one segment or to none."""

    grain: int  # elements of a block
    owners: Tensor  # int32, for each block the number of its segment; the number of segments if it belongs to none
    # int32 matrices. Each row lists the sums of the level before that it adds up; one past the last is zero.
    levels: Sequence[Tensor]

    @property
    def structure(self) -> tuple[int, ...]:
        """Return what a compiled kernel is specialised for: everything but the numbers of blocks and segments."""
        return self.grain, *(level.shape[1] for level in self.levels)

    def sum(self, elements: Tensor) -> Tensor:
        """Return the sum over each segment, along the last dimension."""
        sums = _rows(elements, self.grain).sum(-1) if self.grain > 1 else elements
        for level in self.levels:
            sums = _rows(pad(sums, (0, 1)).index_select(-1, level.flatten()), level.shape[1]).sum(-1)
        return sums

    def norm(self, elements: Tensor) -> Tensor:
        """Return the L2 norm of each segment."""
        return self.sum(elements * elements).sqrt()

    def multiply(self, elements: Tensor, factors: Tensor, *, elsewhere: float) -> Tensor:
        """Multiply each element by the factor of its segment, or by `elsewhere` if it belongs to none."""
        spread = pad(factors, (0, 1), value=elsewhere).index_select(0, self.owners)
        return elements * spread if self.grain == 1 else (_rows(elements, self.grain) * spread.unsqueeze(1)).view(-1)

    def spread(self, values: Tensor) -> Tensor:
        """Return for each block the value of its segment."""
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
    """Channels of parameters with several dimensions: the slices along the first dimension."""

    segments: Segments | Rows  # the channels, in the run or parameter
    parameters: Segments | Whole  # the parameters, in the list of all channels
    channel_roots: Tensor | float  # for each channel, 1 / √(its elements)
    parameter_roots: Tensor | float  # for each parameter, 1 / √(its elements)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Return what a compiled kernel is specialised for."""
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
    """Return the channels of the parameters with elements and two dimensions or more, or None.

    They take about 8 bytes a block. A block is one element, unless all channels begin at multiples of a power of 2.
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
    # A channel of a dense tensor is in pieces as long as the first dimension's stride; the other channels' are between.
    lengths = [part.stride(0) if part.shape[0] > 1 else part.numel() for _, part in parts]
    grain = math.gcd(_WIDTH, run.value.numel(), *(begin for begin, _ in parts), *lengths)
    members, numbers, count = [], [], 0
    for (begin, part), length in zip(parts, lengths, strict=True):
        blocks = torch.arange(begin // grain, (begin + part.numel()) // grain)
        members.append(blocks.view(-1, part.shape[0], length // grain).transpose(0, 1).flatten(1))
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
    return tensor.view(*tensor.shape[:-1], -1, width)


def _begins(run: Run) -> list[int]:
    assert run.memory is not None
    offsets = run.memory.layout.offsets
    return [offset - offsets[run.first] for offset in offsets[run.first : run.last]]


def _segments(members: Sequence[Tensor], blocks: int, grain: int, device: torch.device) -> Segments:
    """Make segments of their members: matrices of numbers of blocks, a row for each segment."""
    count = sum(len(rows) for rows in members)
    owners = torch.full((blocks,), count, dtype=torch.int32)
    first = 0
    for rows in members:
        owners[rows] = torch.arange(first, first + len(rows), dtype=torch.int32)[:, None]
        first += len(rows)
    levels: list[Tensor] = []
    size = blocks
    while not levels or any(rows.shape[1] > 1 for rows in members):
        longest = max(rows.shape[1] for rows in members)
        width = min(_WIDTH, 1 << max(longest - 1, 0).bit_length())
        lacking = [max(-(-rows.shape[1] // width), 1) * width - rows.shape[1] for rows in members]  # of whole rows
        members = [pad(rows, (0, lack), value=size) for rows, lack in zip(members, lacking, strict=True)]
        levels.append(torch.cat([rows.reshape(-1, width) for rows in members]).to(device, torch.int32))
        size, members = _numbered([(len(rows), rows.shape[1] // width) for rows in members])
    return Segments(grain, owners.to(device), levels)


def _numbered(shapes: Sequence[tuple[int, int]]) -> tuple[int, list[Tensor]]:
    """Return matrices of these shapes that count up from 0, and the number after the last."""
    size, numbered = 0, []
    for segments, rows in shapes:
        numbered.append(torch.arange(size, size + segments * rows).view(segments, rows))
        size += segments * rows
    return size, numbered
