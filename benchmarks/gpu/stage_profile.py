"""Kernels, launches and the host's time of a step, and how long the GPU idles: by hand beside the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import loops, stage_step
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT2_124M
from benchmarks.gpu.loops import Mode, Pass, Work
from benchmarks.gpu.results import Case, Findings
from benchmarks.gpu.stage_gpt import TOY, make_work

__all__ = ["busy", "events_on_gpu", "run"]

PASSES = 5
BATCH = 4


def run(device: Device, deadline: Deadline) -> Findings:
    """A table for each model and mode."""
    models: dict[str, Callable[[], Work]] = {
        "tiny model": partial(stage_step.make_work, device, lr=0.0),
        "GPT-2": partial(make_work, device, TOY if device.toy else GPT2_124M, BATCH),
    }
    cases = []
    for title, work in models.items():
        for mode in (Mode("fp32"), Mode("bf16"), Mode("bf16", graph=True)):
            if loops.undeclared(mode, device):
                continue
            hand = loops.captured_by_hand if mode.graph else loops.by_hand
            for name, loop in (("by hand", hand), ("by hand, again", hand), ("trainer", loops.with_trainer)):
                device.forget()
                made = work()
                found = _profiled(loop(made, mode, device), len(made.batches), device)
                print(f"  {title}, {mode}, {name}: {found}", flush=True)
                cases.append(Case(f"{title}, {mode}", name, base="by hand", note="profiled", values=found))
    return Findings({"batch of GPT-2": BATCH, "passes": PASSES}, cases)


def _profiled(train: Pass, steps: int, device: Device) -> dict[str, float]:
    for _ in range(loops.WARM_UP + 2):  # a pass may be one step, and the trainer captures in the step after its warm-up
        train()
    device.clock()
    start = perf_counter()
    for _ in range(PASSES):
        train()
    issued = perf_counter() - start
    whole = device.clock() - start
    events = _profile(train, device)
    on_device = _on_gpu(events)
    found = {
        "host_microseconds_a_step": 1e6 * issued / (PASSES * steps),
        "microseconds_a_step": 1e6 * whole / (PASSES * steps),
        "kernels_a_step": len(on_device) / steps,
        "launches_a_step": sum("Launch" in event.name for event in events) / steps,
    }
    if on_device:
        working = busy((event.time_range.start, event.time_range.end) for event in on_device) / steps
        found["idle_share"] = max(0.0, 1 - working / found["microseconds_a_step"])
    return found


def events_on_gpu(train: Callable[[], object], device: Device) -> list[Any]:
    """Return what a pass does on the GPU, as the profiler's events."""
    return _on_gpu(_profile(train, device))


def _profile(train: Callable[[], object], device: Device) -> list[Any]:
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.cuda else [])]
    with profile(activities=kinds) as profiled:
        train()
        device.clock()
    return list(profiled.events() or [])


def _on_gpu(events: list[Any]) -> list[Any]:
    return [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
