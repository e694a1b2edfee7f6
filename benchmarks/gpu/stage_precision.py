"""What each precision costs and gives: the trainer alone, one mode after the other, from the same seed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from math import isfinite

import torch

from benchmarks.gpu import learnable
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.loops import Mode, Work, arithmetic, undeclared, with_trainer
from benchmarks.gpu.measure import check_compiled, first_line
from benchmarks.gpu.results import Case, Findings
from benchmarks.paired import Spread, Timing
from benchmarks.report import Row, Table, print_table

__all__ = ["run"]

MODELS: dict[str, Callable[[Device], Work]] = {"GPT": learnable.gpt, "ResNet": learnable.resnet}
EAGER = (Mode(fp32="ieee"), Mode(fp32="fast"), Mode("fp16"), Mode("bf16"))
STEPS, TOY_STEPS = 200, 40
WARM_UP = 2 * learnable.BATCHES  # steps that are not timed: compilation, and what libraries do at first
NEEDED = 60.0
"""Seconds that a compiled mode may take: without them it is not begun."""


def run(device: Device, deadline: Deadline) -> Findings:
    """Step time, peak memory, and the loss at the end, for each model and mode."""
    steps = TOY_STEPS if device.toy else STEPS
    options = device.compile_options()
    modes = (*EAGER, *(replace(mode, compile=options) for mode in EAGER))
    cases: list[Case] = []
    failures: list[str] = []
    for mode in modes:  # the compiled ones last: time may run out
        for table, work in MODELS.items():
            reason = undeclared(mode, device)
            if not reason and mode.compile is not None and deadline.left < NEEDED:
                reason = f"{deadline.left:.0f} s were left"
                failures.append(f"{table}, {mode}: not run: {reason}")
            if reason:
                cases.append(Case(table, str(mode), base=str(EAGER[0]), note=f"not run: {reason}"))
                continue
            print(f"  {table}, {mode}", flush=True)
            try:
                cases.append(_train(table, work, mode, device, steps))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what was found
                traceback.print_exc()
                failures.append(f"{table}, {mode}: {first_line(error)}")
                cases.append(Case(table, str(mode), base=str(EAGER[0]), note=f"failed: {first_line(error)}"))
    cases = [_beside(case, cases) for case in sorted(cases, key=lambda case: list(MODELS).index(case.table))]
    for table in MODELS:
        rows = [Row(case.name, case.timing, _words(case)) for case in cases if case.table == table]
        print_table(Table(table, str(EAGER[0]), "ms", {}, rows))
    settings = {"steps": steps, "seed": 0, "optimizer": "AdamW(fused=True)", "compile": options}
    return Findings(settings, cases, (), failures)


def _train(table: str, make: Callable[[Device], Work], mode: Mode, device: Device, steps: int) -> Case:
    torch.compiler.reset()  # or the modes before this one would count against the limit of recompilations
    device.forget()
    held = device.held()
    work = make(device)
    train = with_trainer(work, mode, device)
    start = device.clock()
    train()
    first = device.clock() - start
    train()
    device.measure_peak()  # what the compiler allocated to time its kernels is not the training's
    samples = []
    for _ in range(WARM_UP, steps, len(work.batches)):
        start = device.clock()
        train()
        samples.append((device.clock() - start) / len(work.batches))
    check_compiled(work)
    peak = device.peak()
    loss = _loss(work)
    if not isfinite(loss):
        raise FloatingPointError(f"the loss after {steps} steps is {loss}")
    values = {"loss": loss, "seconds_of_the_first_steps": first, "skipped_steps": float(work.kept[0].skipped)}
    if peak is not None and held is not None:
        values["peak_memory_bytes"] = float(peak - held)
    seconds = Spread.of(samples)
    return Case(table, str(mode), Timing(seconds, seconds), len(samples), str(EAGER[0]), values=values)


def _loss(work: Work) -> float:
    """Of the trained weights on all batches, computed in the same way for every mode: in exact fp32."""
    with torch.no_grad(), arithmetic("ieee"):
        return float(torch.stack([work.loss(work.model, batch) for batch in work.batches]).mean())


def _beside(case: Case, cases: list[Case]) -> Case:
    """With the ratio to the base's median, which was taken at another time."""
    base = next((other for other in cases if (other.table, other.name) == (case.table, case.base)), None)
    if case.timing is None or base is None or base.timing is None:
        return replace(case, timing=None)  # a ratio to nothing
    middle, own = base.timing.seconds.median, case.timing.seconds
    ratio = Spread(**{name: value / middle for name, value in asdict(own).items()})
    return replace(case, timing=Timing(own, ratio))


def _words(case: Case) -> str:
    if not case.values:
        return case.note
    memory = case.values.get("peak_memory_bytes")
    return f"loss {case.values['loss']:.4f}" + (f", peak {memory / 2**30:.2f} GiB" if memory is not None else "")
