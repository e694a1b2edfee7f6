"""ResNet-50 in channels_last: images a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.gpu import loops
from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.loops import Mode, Work
from benchmarks.gpu.measure import Entry, largest_batch, measure, peers
from benchmarks.gpu.resnet import RESNET_50, ResNet
from benchmarks.gpu.results import Case, Findings, Goal

__all__ = ["run"]

HAND, TWIN, TRAINER = "by hand", "by hand, again", "trainer"
CLASSES, SIZE, LARGEST = 1000, 224, 256
TOY_DEPTHS, TOY_WIDTH, TOY_SIZE = (1, 1), 4, 32


def run(device: Device, deadline: Deadline) -> Findings:
    """bf16 and fp16, eager and compiled, each by hand and by the trainer, all in turns."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # for all: shapes do not change
    try:
        return _run(device, deadline)
    finally:
        torch.backends.cudnn.benchmark = before


def _run(device: Device, deadline: Deadline) -> Findings:
    options = device.compile_options()
    modes = [Mode(precision, compile=compile) for compile in (None, options) for precision in ("bf16", "fp16")]
    batch = _batch(device)
    print(f"  a batch of {batch}", flush=True)
    work = partial(_work, device, batch)
    entries = [
        Entry(str(mode), name, HAND, work, loop, mode)
        for mode in modes
        for name, loop in ((HAND, loops.by_hand), (TWIN, loops.by_hand), (TRAINER, loops.with_trainer))
    ]
    # One process allows accelerate one precision.
    entries += peers(str(modes[0]), HAND, work, modes[0])
    rounds, seconds = (2, 0.0) if device.toy else (20, 0.3)
    found = measure(entries, device, deadline, rounds=rounds, seconds=seconds)
    goals = [
        Goal(f"resnet, {mode}: trainer / by hand", 1.01, found.ratio(f"{mode}: {TRAINER}", f"{mode}: {HAND}"))
        for mode in modes
        if not loops.undeclared(mode, device)
    ]
    settings = {
        "model": "ResNet-50" if not device.toy else f"ResNet{TOY_DEPTHS}",
        "batch": batch,
        "image": TOY_SIZE if device.toy else SIZE,
        "memory format": "channels_last",
        "optimizer": "AdamW(fused=True)",
        "cudnn.benchmark": True,
        "compile": options,
    }
    return Findings(settings, [_with_speed(case, batch) for case in found.cases], goals, found.failures)


def _with_speed(case: Case, batch: int) -> Case:
    if case.timing is None:
        return case
    return replace(case, values={"images_per_second": batch / case.timing.seconds.median, **case.values})


def _work(device: Device, batch: int) -> Work:
    torch.manual_seed(0)
    size = TOY_SIZE if device.toy else SIZE
    with device.torch:
        model = ResNet(TOY_DEPTHS, 10, TOY_WIDTH) if device.toy else ResNet(RESNET_50, CLASSES)
        images = torch.randn(batch, 3, size, size)
        targets = torch.randint(10 if device.toy else CLASSES, (batch,))
    images = images.to(memory_format=torch.channels_last)
    return Work(model.to(memory_format=torch.channels_last), _loss, [(images, targets)])


def _loss(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def _batch(device: Device) -> int:
    """As large as fits in half the memory, up to 256; where memory is the host's, 4."""
    memory = device.memory()
    if memory is None or device.toy:
        return 4

    def peak(size: int) -> int | None:
        device.forget()
        train = loops.by_hand(_work(device, size), Mode("bf16"), device)
        train()
        train()
        return device.peak()

    found = largest_batch(peak, room=memory // 2, sizes=(16, 32), most=LARGEST)
    device.forget()
    return found
