"""Events of a step: what was seen where, and a sample of its elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

_KINDS = {
    "random": ("random",),
    "weights": ("weight",),
    "batch": ("batch",),
    "forward": ("input", "output", "loss", "buffer", "operator"),
    "backward": ("grad", "gradient", "operator of backward"),
    "collective": ("reduced", "norm"),
    "update": ("old state", "state", "parameter"),
}
PHASE_OF = {kind: phase for phase, kinds in _KINDS.items() for kind in kinds}
"""The part of a step to which each kind of event belongs."""


class Event(NamedTuple):
    """One thing that was seen in a step.

    Attributes:
        kind: a key of `PHASE_OF`.
        module: the module's name as in `model.named_modules()`.
        item: the number of an input or output, the parameter's or buffer's name, the optimizer state's name with the
            parameter's, or the operator's name.
        number: how often the same was seen before in this step.
    """

    kind: str
    module: str
    item: str
    number: int = 0


class Row(NamedTuple):
    """An event, and where its sample is.

    Attributes:
        key: dtype and device, as in `"float32.cpu"`: the samples of a step that have both in common are joined.
        shape: the tensor's shape on this rank.
        source: the module that made this tensor; empty if no module did.
        size: how many elements the sample has.
    """

    event: Event
    key: str
    shape: tuple[int, ...]
    source: str
    size: int


class Seen(NamedTuple):
    """An event with its sample, which is on the host."""

    event: Event
    shape: tuple[int, ...]
    source: str
    values: Tensor


@dataclass(frozen=True)
class Step:
    """The events of one step in the order in which they came, and for each key of theirs the joined samples."""

    number: int
    rows: Sequence[Row]
    values: Mapping[str, Tensor]

    @cached_property
    def seen(self) -> list[Seen]:
        """The events with their samples."""
        counts = {key: [row.size for row in self.rows if row.key == key] for key in self.values}
        samples = {key: iter(torch.split(values, counts[key])) for key, values in self.values.items()}
        return [Seen(row.event, row.shape, row.source, next(samples[row.key])) for row in self.rows]
