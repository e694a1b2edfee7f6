"""GPT-2 124M: tokens a second, and how much of the card's speed the model uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import loops
from benchmarks.gpu.ceiling import matmul_ceiling
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT, GPT2_124M, Shape
from benchmarks.gpu.loops import Mode, Work
from benchmarks.gpu.measure import Entry, largest_batch, measure, peers
from benchmarks.gpu.results import Case, Findings, Goal

__all__ = ["TOY", "full_batch", "make_work", "run", "with_speed"]

TOY = Shape(layers=1, heads=2, width=16, context=8, vocabulary=64)
FP32, TF32, BF16 = Mode(fp32="ieee"), Mode(fp32="fast"), Mode("bf16")
HAND, TWIN, TRAINER = "by hand", "by hand, again", "trainer"
DEFAULTS = "by hand, torch's defaults"


def run(device: Device, deadline: Deadline) -> Findings:
    """Every mode by hand and by the trainer, all in turns."""
    shape = TOY if device.toy else GPT2_124M
    compiled = Mode("bf16", compile=device.compile_options())
    modes = (FP32, TF32, BF16, compiled)
    ceiling = {} if loops.undeclared(BF16, device) else matmul_ceiling(device)
    batch = full_batch(device, shape)
    print(f"  a batch of {batch}", flush=True)
    work = partial(make_work, device, shape, batch)
    entries = [
        Entry(str(mode), name, HAND, work, loop, mode)
        for mode in modes
        for name, loop in ((HAND, loops.by_hand), (TWIN, loops.by_hand), (TRAINER, loops.with_trainer))
    ]
    if "options" in compiled.compile:
        entries.append(Entry(str(compiled), DEFAULTS, HAND, work, loops.by_hand, Mode("bf16", compile={})))
    # One process allows accelerate one precision.
    entries += [entry for mode in (BF16, compiled) for entry in peers(str(mode), HAND, work, mode)]
    rounds, seconds = (2, 0.0) if device.toy else (20, 0.3)
    found = measure(entries, device, deadline, rounds=rounds, seconds=seconds)
    with torch.device("meta"):
        operations = GPT(shape).operations()
    tokens = batch * shape.context
    peak = ceiling.get("ceiling_operations_per_second")
    cases = [with_speed(case, tokens, operations, peak) for case in found.cases]
    fastest = [case for case in cases if (case.table, case.name) == (str(compiled), TRAINER)]
    goals = [
        *(
            Goal(f"gpt, {mode}: trainer / by hand", 1.01, found.ratio(f"{mode}: {TRAINER}", f"{mode}: {HAND}"))
            for mode in modes
            if not loops.undeclared(mode, device)
        ),
        Goal(
            "gpt: fp32 ieee by hand / bf16 + compile by the trainer",
            6,
            found.ratio(f"{FP32}: {HAND}", f"{compiled}: {TRAINER}"),
            at_least=True,
        ),
        Goal(
            "gpt, bf16 + compile by the trainer: model FLOPs utilisation",
            0.5,
            fastest[0].values.get("utilisation"),
            at_least=True,
        ),
    ]
    settings = {
        "model": asdict(shape),
        "batch": batch,
        "tokens a step": tokens,
        "operations a token": operations,
        "formula": "6 N + 12 L H Q T",
        "optimizer": "AdamW(fused=True)",
        "attention": _attention(device, shape),
        "compile": compiled.compile,
        **ceiling,
    }
    return Findings(settings, cases, goals, found.failures)


def with_speed(case: Case, tokens: int, operations: int, ceiling: float | None) -> Case:
    """Return the case with its tokens a second, and its share of the card's ceiling if that is known."""
    if case.timing is None:
        return case
    speed = tokens / case.timing.seconds.median
    used = {} if ceiling is None else {"utilisation": speed * operations / ceiling}
    return replace(case, values={"tokens_per_second": speed, **used, **case.values})


def make_work(device: Device, shape: Shape, batch: int) -> Work:
    torch.manual_seed(0)
    with device.torch:
        model = GPT(shape)
        tokens = torch.randint(shape.vocabulary, (batch, shape.context + 1))
    return Work(model, _loss, [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])


def _loss(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


def _attention(device: Device, shape: Shape) -> str:
    """The implementation of attention that torch takes for bf16."""
    size = (1, shape.heads, shape.context, shape.width // shape.heads)
    query = torch.empty(size, device=device.torch, dtype=torch.bfloat16, requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(query, query, query, is_causal=True)).name


def full_batch(device: Device, shape: Shape) -> int:
    """Up to 32, as large as fits in two fifths of the memory in fp32; where memory is the host's, 4.

    The weights and moments of all loops stay in the memory beside it.
    """
    memory = device.memory()
    if memory is None or device.toy:
        return 4

    def peak(size: int) -> int | None:
        device.forget()
        train = loops.by_hand(make_work(device, shape, size), FP32, device)
        train()
        train()
        return device.peak()

    found = largest_batch(peak, room=memory * 2 // 5, sizes=(2, 4), most=32)
    device.forget()
    return found
