"""How long it takes until a training runs: select, the first step of each kind, a compiled optimizer's first step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch._inductor.utils import fresh_cache

from benchmarks.gpu import loops
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT2_124M
from benchmarks.gpu.loops import Loop, Mode
from benchmarks.gpu.results import Case, Findings
from benchmarks.gpu.stage_gpt import TOY, make_work

__all__ = ["run"]

BATCH = 4
_SELECT = """
import sys, time, torch
start = time.perf_counter()
import accelcore
accel = accelcore.select(sys.argv[1])
torch.ones(1, device=accel.device)
accel.runtime.synchronize()
print(time.perf_counter() - start)
"""
_INITIALISE = """
import sys, time, torch
start = time.perf_counter()
torch.ones(1, device=sys.argv[1])
if sys.argv[1] == "cuda": torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def run(device: Device, deadline: Deadline) -> Findings:
    """Seconds, each measured once: a start happens once."""
    shape = TOY if device.toy else GPT2_124M
    work = partial(make_work, device, shape, BATCH)
    values = {"select, torch imported before": _process(_SELECT, device), "torch alone": _process(_INITIALISE, device)}
    compiled = Mode("bf16", compile=device.compile_options())
    ways = {"by hand": loops.by_hand, "by hand, again": loops.by_hand, "trainer": loops.with_trainer}
    for name, loop in ways.items():
        values[f"{name}, eager"] = _first(work, loop, Mode("bf16"), device)
        with fresh_cache():  # earlier stages have filled the usual one
            for state in ("", ", inductor's cache warm"):
                torch.compiler.reset()
                values[f"{name}, compiled{state}"] = _first(work, loop, compiled, device)
    captured = Mode("bf16", graph=True)
    if not loops.undeclared(captured, device):
        values["by hand, warm-up and capture"] = _first(work, loops.captured_by_hand, captured, device, passes=5)
        values["trainer, warm-up and capture"] = _first(work, loops.with_trainer, captured, device, passes=5)
    for again in ("", ", again"):
        values[f"first step of lamb{again}"] = _lamb(work, device)
    cases = [Case("start", name, values={"seconds": seconds}) for name, seconds in values.items()]
    for case in cases:
        print(f"  {case.name}: {case.values['seconds']:.3f} s", flush=True)
    return Findings({"model": "GPT-2 124M", "batch": BATCH, "precision": "bf16"}, cases)


def _process(script: str, device: Device) -> float:
    done = subprocess.run(
        [sys.executable, "-c", script, device.type], capture_output=True, text=True, timeout=120, check=True
    )
    return float(done.stdout.split()[-1])


def _first(make: Callable[[], loops.Work], loop: Loop, mode: Mode, device: Device, passes: int = 1) -> float:
    device.forget()
    work = make()
    start = device.clock()
    train = loop(work, mode, device)
    for _ in range(passes):
        train()
    return device.clock() - start


def _lamb(make: Callable[[], loops.Work], device: Device) -> float:
    device.forget()
    work = replace(make(), kept=[])
    optimizer = device.accel.optimizers.create("lamb", work.model.parameters(), lr=1e-3)
    trainer = device.accel.trainer(work.model, optimizer, loss=work.loss, precision="bf16")
    start = device.clock()
    trainer(work.batches[0])
    return device.clock() - start
