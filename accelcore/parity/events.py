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
    """One thing that was seen in a step."""

    kind: str  # a key of `PHASE_OF`
    module: str  # the module's name as in `model.named_modules()`
    # the number of an input or output, the name of a parameter or buffer, that of an optimizer's state with its
    # parameter's, or the operator's name
    item: str
    number: int = 0  # how often the same was seen before in this step


class Row(NamedTuple):
    """An event, and where its sample is."""

    event: Event
    key: str  # dtype and device, as in `"float32.cpu"`: the samples of a step that have both in common are joined
    shape: tuple[int, ...]  # the tensor's shape on this rank
    source: str  # the module that made this tensor; empty if no module did
    size: int  # how many elements the sample has


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
