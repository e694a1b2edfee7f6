"""GPT-2 124M at small batches and at the full one, in every way to launch a step.

At small batches the host and not the GPU may set the pace.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import loops
from benchmarks.gpu.ceiling import matmul_ceiling
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT, GPT2_124M
from benchmarks.gpu.loops import Loop, Mode
from benchmarks.gpu.measure import Entry, Measured, measure
from benchmarks.gpu.results import Findings
from benchmarks.gpu.stage_gpt import TOY, full_batch, make_work, with_speed

__all__ = ["run"]

BATCHES = (4, 8)
IN_GPT = ("eager", "compile")
"""Ways that the stage `gpt` measures at the full batch."""
HAND, TWIN, TRAINER = "by hand", "by hand, again", "trainer"


def run(device: Device, deadline: Deadline) -> Findings:
    """A table for each batch and way, so that the memory of one is free again for the next."""
    shape = TOY if device.toy else GPT2_124M
    ceiling = {} if loops.undeclared(Mode("bf16"), device) else matmul_ceiling(device)
    peak = ceiling.get("ceiling_operations_per_second")
    with torch.device("meta"):
        operations = GPT(shape).operations()
    rounds, seconds = (2, 0.0) if device.toy else (20, 0.2)
    measured = Measured()
    ways, full = _ways(device), full_batch(device, shape)
    tables = [(batch, name) for batch in BATCHES for name in ways]
    tables += [(full, name) for name in ways if name not in IN_GPT]
    for number, (batch, name) in enumerate(tables):
        device.forget()
        mode, table, work = ways[name], f"batch {batch}, {name}", partial(make_work, device, shape, batch)
        hand: Loop = loops.captured_by_hand if mode.graph else loops.by_hand
        twin = () if number >= len(BATCHES) * len(ways) else ((TWIN, hand),)  # three full graphs may not fit
        cases = ((HAND, hand), *twin, (TRAINER, loops.with_trainer))
        entries = [Entry(table, case, HAND, work, loop, mode) for case, loop in cases]
        share = Deadline(deadline.left / (len(tables) - number))
        found = measure(entries, device, share, rounds=rounds, seconds=seconds, reserve=0.0)
        found.cases = [with_speed(case, batch * shape.context, operations, peak) for case in found.cases]
        measured.extend(found)
    settings = {"precision": "bf16", "context": shape.context, "batches": [*BATCHES, full], **ceiling}
    return Findings(settings, measured.cases, failures=measured.failures)


def _ways(device: Device) -> dict[str, Mode]:
    compiled = device.compile_options()
    ways = {"eager": Mode("bf16"), "compile": Mode("bf16", compile=compiled)}
    if not device.toy:
        ways["reduce-overhead"] = Mode("bf16", compile=device.compile_options("reduce-overhead"))
    return {
        **ways,
        "graph": Mode("bf16", graph=True),
        "compile + graph": Mode("bf16", compile=compiled, graph=True),
    }
