"""Events of a step: what was seen where, and a sample of its elements, some two hundred of each tensor.

A hook runs between two large operators and finds the processor's caches cold, so that each line of it takes long.
Therefore a hook only notes a tensor; samples of many are copied together. The rows of a step are made at its end, and
most steps have the same ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcore.optim.shards import to_local
from accelcore.roles.runtime import fetch

_KINDS = {
    "random": ("random",),
    "weights": ("weight",),
    "batch": ("batch",),
    "forward": ("input", "output", "loss", "buffer", "operator"),
    "backward": ("grad", "gradient", "operator of backward"),
    "collective": ("reduced", "norm"),
    "update": ("learning rate", "old state", "state", "parameter"),
}
PHASE_OF = {kind: phase for phase, kinds in _KINDS.items() for kind in kinds}
"""The part of a step to which each kind of event belongs."""

_SHARE = 0.6180339887498949 / 128
"""Distance of the elements of a sample, in parts of the tensor; the golden ratio shows all rows and columns alike."""
_HELD = 1 << 23  # how many elements the tensors may have together that wait for their samples to be copied
_NUMBERS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool))
"""The dtypes that need no look at what kind of numbers they are."""


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
class SeenStep:
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


class Samples:
    """Takes samples of the tensors that are noted, and joins them at the end of a step.

    A tensor that waits for its sample may be changed in place before it is taken. To find out which ones are, samples
    are copied at once in the first step. Of those, they always are. In the context `pause` no operators are reported.
    """

    def __init__(self, pause: AbstractContextManager[None]) -> None:
        self._pause = pause
        # Kind, module, item, source, tensor, its version, and the copy of its sample, if there is one.
        self._noted: list[tuple[str, str, str, str, Tensor, int, Tensor | None]] = []
        self._held = 0  # elements of the tensors that are noted
        self._is_first = True
        self._changing: set[tuple[str, str, str]] = set()
        self._heads: list[tuple[Any, ...]] = []  # for each sample: the parts of its row
        self._parts: list[Tensor] = []
        self._last: tuple[list[tuple[Any, ...]], tuple[Row, ...]] = [], ()  # the heads and rows of the last step

    def add(
        self, kind: str, module: str, item: str, tensor: Tensor, source: str = "", *, at_once: bool = False
    ) -> None:
        """Note a tensor; `at_once` if it may be changed without a trace. Not many are kept alive, see `_HELD`."""
        if tensor.is_nested:
            tensor = tensor.values()
        if tensor.requires_grad:
            tensor = tensor.detach()  # which shares memory and version, and does not keep the graph alive
        copy = None
        if at_once or self._is_first or (kind, module, item) in self._changing:
            with self._pause:
                copy = elements(to_local(tensor)).clone()
        self._noted.append((kind, module, item, source, tensor, tensor._version, copy))
        self._held += tensor.numel()
        if self._held > _HELD:
            self.flush()

    def flush(self) -> None:
        """Take samples of what was noted, by one operator for each dtype and device."""
        views: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        noted, self._noted, self._held = self._noted, [], 0
        with self._pause:
            for kind, module, item, source, tensor, version, copy in noted:
                if tensor._version != version:
                    self._changing.add((kind, module, item))
                    if copy is None:  # it is lost for this step
                        continue
                local = to_local(tensor)
                view = elements(local) if copy is None else copy
                dtype, device = key = view.dtype, view.device
                self._heads.append((kind, module, item, source, local.shape, dtype, device, view.numel()))
                views.setdefault(key, []).append(view)
            self._parts += [torch.cat(each) for each in views.values()]

    def end(self, number: int) -> Callable[[], SeenStep]:
        """Join the samples of a step, begin to copy them to the host, and return a function that waits for them."""
        self.flush()
        heads, rows = self._last
        if self._heads != heads:
            rows = _rows(self._heads)
        parts = defaultdict(list)
        for part in self._parts:
            parts[_key(part.dtype, part.device)].append(part)
        arriving = {key: fetch(torch.cat(each)) for key, each in parts.items()}
        self._last, self._heads, self._parts, self._is_first = (self._heads, rows), [], [], False
        return lambda: SeenStep(number, rows, {key: ready() for key, ready in arriving.items()})


def elements(tensor: Tensor) -> Tensor:
    """Return some two hundred elements of a tensor, spread over all of it, in its dtype and on its device.

    Which ones depends only on the shape; of a small tensor it is all. The result may share the tensor's memory.
    """
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.dtype not in _NUMBERS:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.element_size() == 1 and tensor.is_floating_point():  # fp8, for which few operators exist
            tensor = tensor.float()
    count, distance = _spread(tensor.numel())
    if tensor.is_contiguous():
        return tensor.as_strided((count,), (distance,))
    return torch.take(tensor, _places(count, distance, tensor.device))


@lru_cache(maxsize=4096)
def _spread(size: int) -> tuple[int, int]:
    """Return how many elements a sample has, and how far they are apart.

    A distance that divides a dimension would show one row or column only.
    """
    distance = max(1, int(size * _SHARE))
    while gcd(distance, size) != 1:
        distance -= 1
    return -(-size // distance), distance


@lru_cache(maxsize=256)
def _places(count: int, distance: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * distance, distance, device=device)


def _rows(heads: Sequence[tuple[Any, ...]]) -> tuple[Row, ...]:
    """Return the rows of a step, in which what was seen several times is numbered."""
    numbers: Counter[tuple[str, str, str]] = Counter()
    rows = []
    for kind, module, item, source, shape, dtype, device, size in heads:
        name = kind, module, item
        rows.append(Row(Event(*name, numbers[name]), _key(dtype, device), tuple(shape), source, size))
        numbers[name] += 1
    return tuple(rows)


@lru_cache
def _key(dtype: torch.dtype, device: torch.device) -> str:
    return f"{dtype}.{device}".removeprefix("torch.")
