"""The nine optimizers beside torch's own and pytorch_optimizer's, in multiples of what memory allows.

An update cannot be faster than the memory that it has to read and write. That floor is measured in the same rounds: an
in-place addition that moves as many bytes, and so has no more of them in the cache. A few large tensors, and many
small ones, where the calls cost more than the memory; each with one thread and with two. Ours goes by
`accel.optimizers.create` in a loop of one's own, and bound to flat memory as a trainer binds it. For each the table
says which route was taken, and which kernels a profile of one step shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle, islice
from math import prod
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import accelcore
from accelcore.optim.flat.memory import Slot, lay_flat
from accelcore.optim.optimizer import RoutedOptimizer
from benchmarks.paired import Samples, compare, sample
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "FLAT", "FLOOR", "NINE", "OWN", "PEER", "SIZES", "TORCH", "run"]

DISTRIBUTIONS = ("accelcore", "accelcore-cpu", "torch", "pytorch-optimizer")
FLOOR, TWIN, OWN, FLAT = "memory floor", "memory floor, again", "accelcore, own loop", "accelcore, flat"
PEER = "pytorch_optimizer"
TORCH: Mapping[str, Mapping[str, bool]] = {
    "torch for-loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
}
ADDITION = 12  # bytes an element: two read, one written
WARM_UP = 3  # steps before the weights are compared and the time is taken
ALIKE = 1e-4  # how far apart weights may be then, as a part of the way they have come


@dataclass(frozen=True)
class Kind:
    """One optimizer.

    Attributes:
        options: what it is made with, everywhere.
        moved: bytes that an update has to move for each parameter, where a tensor stays in the cache between two looks
            at it.
        again: the same where it does not. What has to know a norm before it can update reads some of it twice.
        torch: torch's class.
        peer: pytorch_optimizer's class, and by how much ours is to be faster, for large tensors and for many.
    """

    options: Mapping[str, Any]
    moved: int
    again: int
    torch: Any = None
    peer: tuple[str, Mapping[str, float]] | None = None
    limits: Mapping[str, float] = field(default_factory=lambda: {"big": 1.10, "many": 1.25})


_DECAY = {"lr": 1e-3, "weight_decay": 0.01}
_NORMED = {"big": 1.10, "many": 1.5}
NINE: Mapping[str, Kind] = {
    "adadelta": Kind(_DECAY, 28, 28, torch.optim.Adadelta),
    "adam": Kind(_DECAY, 28, 28, torch.optim.Adam),
    "adamp": Kind(_DECAY, 28, 40, peer=("AdamP", {"big": 5.0, "many": 8.0}), limits=_NORMED),
    "adamw": Kind(_DECAY, 28, 28, torch.optim.AdamW),
    "bertadam": Kind(_DECAY, 28, 32, limits=_NORMED),
    "lamb": Kind(_DECAY, 28, 40, peer=("Lamb", {"big": 3.5, "many": 7.0}), limits=_NORMED),
    "rmsprop": Kind(_DECAY, 20, 20, torch.optim.RMSprop),
    "rmsproptf": Kind({**_DECAY, "momentum": 0.9}, 28, 28),
    "sgd": Kind({**_DECAY, "momentum": 0.9}, 20, 20, torch.optim.SGD),
}
_SMALL = [(128, 128), (128,), (64, 256), (256,), (96, 96), (96,)]
SIZES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "big": [(2048, 1024)] * 10,
    "many": list(islice(cycle(_SMALL), 1000)),
}
ROUNDS, SECONDS = {"big": 9, "many": 15}, 0.01


def run(quick: bool) -> Iterator[Table]:
    """A table for each optimizer, size and number of threads; quick: a tenth of the tensors, one thread."""
    for threads in (1,) if quick else (1, 2):
        torch.set_num_threads(threads)
        for size, shapes in SIZES.items():
            for name in NINE:
                chosen = shapes[: len(shapes) // 10] if quick else shapes
                yield _table(name, size, chosen, threads, rounds=3 if quick else ROUNDS[size])


def _table(name: str, size: str, shapes: Sequence[tuple[int, ...]], threads: int, rounds: int) -> Table:
    kind, elements = NINE[name], sum(map(prod, shapes))
    moved = kind.again if size == "big" else kind.moved
    cases = _Cases(name, shapes)
    cases.check()
    alike = elements * moved // ADDITION
    there, added = torch.ones(alike), torch.zeros(alike)
    add = {case: lambda: there.add_(added) for case in (FLOOR, TWIN)}
    samples = sample({**add, **cases.steps}, rounds=rounds, seconds=SECONDS)
    timings = compare(samples, FLOOR)
    speed = moved * elements / median(samples[FLOOR]) / 1e9
    notes = {FLOOR: f"{moved} bytes a parameter at {speed:.1f} GB/s", TWIN: "noise floor"}
    title = f"{name}, {size}, {threads} thread{'s' * (threads > 1)}"
    rows = [
        Row(case, timing, f"{timing.seconds.median / elements * 1e9:.3f} ns a parameter; {note}")
        for case, timing in timings.items()
        for note in (notes.get(case) or cases.routes[case]["route"],)
    ]
    return Table(
        title=title,
        base=FLOOR,
        unit="ms",
        settings={
            "optimizer": name,
            "size": size,
            "threads": threads,
            "tensors": len(shapes),
            "elements": elements,
            "bytes a parameter": moved,
            "elements added by the floor": added.numel(),
            "options": dict(kind.options),
            "rounds": rounds,
            "seconds a sample": SECONDS,
            "clock": "perf_counter",
            "routes": cases.routes,
        },
        rows=rows + [Row(case, None, reason) for case, reason in cases.missing.items()],
        goals=list(_goals(title, kind, size, samples)),
    )


def _goals(title: str, kind: Kind, size: str, samples: Samples) -> Iterator[Goal]:
    def ratio(case: str, base: str) -> float:
        return median(one / other for one, other in zip(samples[case], samples[base], strict=True))

    for case in (OWN, FLAT):
        if case in samples:
            yield Goal(f"{title}: {case} / {FLOOR}", kind.limits[size], ratio(case, FLOOR))
    if kind.peer is not None and {OWN, PEER} <= samples.keys():
        yield Goal(f"{title}: {OWN} / {PEER}", round(1 / kind.peer[1][size], 4), ratio(OWN, PEER))


class _Cases:
    """What steps one optimizer, all from the same weights with the same gradients.

    Attributes:
        steps: a step, by the name of the case.
        routes: for each case the route it takes, why not another, and the kernels that a profile shows.
        missing: why the others are not there.
    """

    def __init__(self, name: str, shapes: Sequence[tuple[int, ...]]) -> None:
        torch.manual_seed(0)
        self._start = [torch.randn(shape).mul_(0.02) for shape in shapes]
        self._gradients = [torch.randn(shape).mul_(0.01) for shape in shapes]
        self._kind = NINE[name]
        self._weights: dict[str, list[nn.Parameter]] = {}
        self.steps: dict[str, Callable[[], object]] = {}
        self.routes: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self._add_ours(name)
        self._add_torchs()
        self._add_peers()

    def check(self) -> None:
        """AssertionError where what is to do the same did not, in the steps so far.

        How far weights are apart is a part of how far they have come: rounding that decides the sign of a gradient
        makes single elements differ by more.
        """
        first, *others = [case for case in (OWN, FLAT, *TORCH) if case in self._weights] or [PEER]
        for case in others:
            for place in (0, -1):
                one, other = self._weights[first][place].detach(), self._weights[case][place].detach()
                apart, moved = (one - other).norm(), (one - self._start[place]).norm()
                assert moved > 0, f"{first} left weights as they were"
                assert apart <= ALIKE * moved, f"{case} does not train as {first} does: {apart / moved:.1e} of the way"

    def _add_ours(self, name: str) -> None:
        accel = accelcore.select("cpu")
        if name not in accel.optimizers.names():
            self.missing |= dict.fromkeys((OWN, FLAT), "accelcore has no such optimizer here")
            return
        for case in (OWN, FLAT):
            weights = self._fresh(case)
            optimizer = accel.optimizers.create(name, weights, **self._kind.options)
            if case == FLAT:
                if optimizer.route_for([torch.float32], flat=True).memory == "tensors":
                    del self._weights[case]
                    self.missing[case] = f"its route {optimizer.route} takes a tensor for each parameter"
                    continue
                _bind_flat(optimizer, weights)
            choices = accel.optimizers.explain(name, **self._kind.options)
            explained = {choice.route: "chosen" if choice.chosen else choice.reason for choice in choices}
            self._add(case, optimizer, {"route": optimizer.route, "explained": explained})

    def _add_torchs(self) -> None:
        for case, switch in TORCH.items():
            if self._kind.torch is None:
                self.missing[case] = "torch has no such optimizer"
                continue
            try:
                self._kind.torch([nn.Parameter(torch.zeros(1))], **self._kind.options, **switch)
            except (RuntimeError, TypeError):
                self.missing[case] = "torch has no such kernel for the CPU"
                continue
            self._add(case, self._kind.torch(self._fresh(case), **self._kind.options, **switch), {"route": case})

    def _add_peers(self) -> None:
        if self._kind.peer is None:
            return
        if find_spec(PEER) is None:
            self.missing[PEER] = "not installed"
            return
        import pytorch_optimizer

        kind = getattr(pytorch_optimizer, self._kind.peer[0])
        self._add(PEER, kind(self._fresh(PEER), **self._kind.options), {"route": PEER})

    def _fresh(self, case: str) -> list[nn.Parameter]:
        """Parameters with gradients, of this case's own: no case finds them in the cache because of another."""
        weights = self._weights[case] = [nn.Parameter(start.clone()) for start in self._start]
        for weight, gradient in zip(weights, self._gradients, strict=True):
            weight.grad = gradient.clone()
        return weights

    def _add(self, case: str, optimizer: torch.optim.Optimizer, route: dict[str, Any]) -> None:
        for _ in range(WARM_UP - 1):
            optimizer.step()
        self.steps[case] = optimizer.step
        self.routes[case] = {**route, "kernels": _kernels(optimizer.step)}


def _bind_flat(optimizer: RoutedOptimizer, weights: Sequence[nn.Parameter]) -> None:
    """Bind it as a trainer does that lays its model flat, and has gathered the gradients."""
    (memory,) = lay_flat([Slot(str(number), 0, weight, weight) for number, weight in enumerate(weights)], [0])
    memory.collect()
    optimizer.bind(memory.runs(memory.values, memory.gradients))


def _kernels(step: Callable[[], object]) -> list[dict[str, object]]:
    """The operators that take most of a step's time by themselves, as torch's profiler sees them."""
    with _stderr_closed(), profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    events = seen.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    return [
        {"name": event.key, "calls": event.count, "share": round(event.self_cpu_time_total / total, 3)}
        for event in sorted(events, key=lambda event: -event.self_cpu_time_total)[:3]
    ]


@contextmanager
def _stderr_closed() -> Iterator[None]:
    """The profiler's library writes two lines to it each time, which no setting of it prevents."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
