"""The nine optimizers by the route that `auto` takes: against float64, and against the bandwidth of a copy.

The bandwidth is that of a captured graph of the step, which is the GPU's time alone. The time of a step that the host
launches stands beside it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.optim.flat.memory import Run, Slot, lay_flat
from accelcore.optim.formulas import FORMULAS
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT, GPT2_124M
from benchmarks.gpu.measure import first_line
from benchmarks.gpu.results import Case, Findings, Goal
from benchmarks.paired import compare, sample
from benchmarks.report import Row, Table, print_table

__all__ = ["run"]

# Options, and how many float32 numbers an update has to move for each parameter, at least.
OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    "adadelta": ({"weight_decay": 0.01}, 7),
    "adam": ({"weight_decay": 0.01}, 7),
    "adamp": ({"weight_decay": 0.01}, 10),
    "adamw": ({}, 7),
    "bertadam": ({}, 8),
    "lamb": ({"weight_decay": 0.01}, 10),
    "rmsprop": ({"weight_decay": 0.01}, 5),
    "rmsproptf": ({"weight_decay": 0.01, "momentum": 0.9}, 7),
    "sgd": ({"momentum": 0.9, "weight_decay": 0.01}, 5),
}
LR = 1e-3


def _gpt2() -> list[tuple[int, ...]]:
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in GPT(GPT2_124M).parameters()]


SMALL = ((128, 128), (128,), (64, 256), (256,), (96, 96), (96,))
TABLES: dict[str, list[tuple[int, ...]]] = {
    "21M in 10 tensors": [(2048, 1024)] * 10,
    "7M in 1000 tensors": list(islice(cycle(SMALL), 1000)),
    "GPT-2 124M's parameters": _gpt2(),
}
TOY_TABLES = {name: list(islice(cycle(SMALL), 12)) for name in TABLES}
COPIED, TOY_COPIED = 2**27, 2**10
"""Numbers that are copied to measure the bandwidth: more than a cache holds."""
COPY, TWIN, LAUNCHED = "copy", "copy, again", ", launched by the host"
STEPS = 5
SHARE, DIFFERENCE = 0.8, 1e-5
# Of all kinds: without dimensions or elements, norms above 10, channels of odd and of even lengths.
KINDS = [(), (0, 3), (7,), (5, 3), (33, 40), (6, 5, 3, 3), (64, 128), (1000, 140)]


def run(device: Device, deadline: Deadline) -> Findings:
    """The largest difference from float64 of each, and its share of the bandwidth of a copy."""
    failures: list[str] = []
    differences = {name: _tried(name, failures, partial(_difference, name, device)) for name in OPTIMIZERS}
    goals = [
        Goal(f"{name}: largest difference of a weight from float64 after {STEPS} steps", DIFFERENCE, found)
        for name, found in differences.items()
    ]
    cases: list[Case] = []
    for number, (table, shapes) in enumerate((TOY_TABLES if device.toy else TABLES).items()):
        torch.compiler.reset()
        share = Deadline(deadline.left / (len(TABLES) - number))
        found = _measured(table, shapes, device, share, failures)
        goals += [
            Goal(f"{name}, {table}: share of the bandwidth of a copy", SHARE, shares, at_least=True)
            for name, shares in ((case.name, case.values.get("share_of_copy")) for case in found)
            if name in OPTIMIZERS
        ]
        cases += found
    settings = {"lr": LR, "options": {name: options for name, (options, _) in OPTIMIZERS.items()}}
    return Findings({**settings, "differences": differences}, cases, goals, failures)


def _measured(
    table: str, shapes: Sequence[tuple[int, ...]], device: Device, deadline: Deadline, failures: list[str]
) -> list[Case]:
    numbers = TOY_COPIED if device.toy else COPIED
    source, target = (torch.ones(numbers, device=device.torch) for _ in range(2))
    graphs = device.accel.capabilities.graphs
    passes: dict[str, Callable[[], object]] = dict.fromkeys((COPY, TWIN), lambda: target.copy_(source))
    routes = {COPY: "", TWIN: ""}
    for name in OPTIMIZERS:
        optimizer = _tried(f"{table}, {name}", failures, partial(_bound, name, shapes, device))
        if optimizer is not None:
            launched = name + LAUNCHED if graphs else name
            passes[launched], routes[launched] = optimizer.step, f"route {optimizer.route}"
            if graphs:
                captured = _tried(f"{table}, {name}, captured", failures, partial(_captured, optimizer, device))
                if captured is not None:
                    passes[name], routes[name] = captured, f"route {optimizer.route}, as a graph"
    a_round = sum(_time(step, device) for step in passes.values())
    seconds = 0.0 if device.toy else 0.02
    rounds = max(2, min(2 if device.toy else 100, int((deadline.left - 10) / (len(passes) * seconds * 2 + a_round))))
    timings = compare(sample(passes, rounds=rounds, seconds=seconds, clock=device.clock), COPY)
    parameters = sum(prod(shape) for shape in shapes)
    cases = []
    for name, timing in timings.items():
        optimizer = name.removesuffix(LAUNCHED)
        moved = 4 * OPTIMIZERS[optimizer][1] * parameters if optimizer in OPTIMIZERS else 8 * numbers
        values = {"bytes_per_second": moved / timing.seconds.median}
        if optimizer in OPTIMIZERS:
            values["share_of_copy"] = moved / (8 * numbers) / timing.ratio.median
        cases.append(Case(table, name, timing, rounds, COPY, routes[name], values))
    rows = [
        Row(case.name, case.timing, f"{case.note} {case.values.get('share_of_copy', 1):.0%} of a copy")
        for case in cases
    ]
    print_table(Table(table, COPY, "µs", {}, rows))
    return cases


def _bound(name: str, shapes: Sequence[tuple[int, ...]], device: Device) -> Any:
    """An optimizer of parameters in flat memory, where its route takes that; gradients are there."""
    torch.manual_seed(0)
    values = [nn.Parameter(0.02 * torch.randn(shape, device=device.torch)) for shape in shapes]
    for value in values:
        value.grad = 0.01 * torch.randn_like(value)
    optimizer = device.accel.optimizers.create(name, values, lr=LR, **OPTIMIZERS[name][0])
    slots = [Slot(str(number), 0, value, value) for number, value in enumerate(values)]
    if optimizer.route_for([torch.float32], flat=True).memory == "tensors":
        optimizer.bind([Run([slot], slot.trained) for slot in slots])
    else:
        memories = lay_flat(slots, [0])
        for memory in memories:
            memory.collect()
        optimizer.bind([run for memory in memories for run in memory.runs(memory.values, memory.gradients)])
    for _ in range(3):  # compiles
        optimizer.step()
    return optimizer


def _captured(optimizer: Any, device: Device) -> Callable[[], None]:
    _, replay = device.accel.runtime.capture(optimizer.step)
    return replay


def _difference(name: str, device: Device) -> float:
    """In a loop of one's own, from the formula in float64 on the host, by the same gradients."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in KINDS]
    ours = [nn.Parameter(value.to(device.torch, torch.float32)) for value in start]
    exact = [nn.Parameter(value.float().double()) for value in start]
    optimizer = device.accel.optimizers.create(name, ours, lr=LR, **OPTIMIZERS[name][0])
    oracle = FORMULAS[name](exact, lr=LR, **OPTIMIZERS[name][0])
    for _ in range(STEPS):
        for mine, true in zip(ours, exact, strict=True):
            noise = torch.randn(true.shape, generator=generator)
            gradient = noise + noise.sign()  # where decay cancels a gradient, RMSprop's first update is one of rounding
            mine.grad, true.grad = gradient.to(device.torch), gradient.double()
        optimizer.step()
        oracle.step()
    return max(_largest(mine, true) for mine, true in zip(ours, exact, strict=True))


def _largest(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().cpu().double() - exact.detach()).abs().max()) if exact.numel() else 0.0


def _tried(what: str, failures: list[str], attempt: Callable[[], Any]) -> Any:
    """What it returns; None where it raises, which is a failure of its own."""
    try:
        return attempt()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what was found
        traceback.print_exc()
        failures.append(f"{what}: {first_line(error)}")
        return None


def _time(step: Callable[[], object], device: Device) -> float:
    start = device.clock()
    step()
    return device.clock() - start
