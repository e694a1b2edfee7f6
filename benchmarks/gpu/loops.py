"""One training as loops written with torch alone, with accelcore, and with its peers, in every mode.

Each loop returns a callable that trains on every batch once and returns the last loss. What can be made before the
first step is made outside it, and nothing in it asks what the mode is. The fused AdamW is everybody's optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import accelcore
from benchmarks.gpu.device import Device

__all__ = [
    "PEERS",
    "WARM_UP",
    "Loop",
    "Mode",
    "Pass",
    "Work",
    "accelerate",
    "arithmetic",
    "by_hand",
    "captured_by_hand",
    "fabric",
    "undeclared",
    "with_trainer",
]

Batch = tuple[Tensor, Tensor]
Pass = Callable[[], Tensor]
WARM_UP = 3
"""Windows that a captured training runs eagerly before its graph."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Mode:
    """How to compute.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        fp32: "ieee", "fast" (TF32), or None for torch's own setting.
        compile: options for torch.compile; None leaves it out.
        graph: whether the whole step is one CUDA graph.
    """

    precision: str = "fp32"
    fp32: str | None = None
    compile: Mapping[str, Any] | None = None
    graph: bool = False

    def __str__(self) -> str:
        words = {"ieee": f"{self.precision} ieee", "fast": "TF32", None: self.precision}[self.fp32]
        return words + (" + compile" if self.compile is not None else "") + (" + graph" if self.graph else "")


@dataclass
class Work:
    """What is trained: a model on the device, a loss, and batches on the device."""

    model: nn.Module
    loss: Callable[[Callable[..., Tensor], Batch], Tensor]
    batches: Sequence[Batch]
    lr: float = 1e-4
    kept: list[accelcore.Trainer] = field(default_factory=list)
    """Trainers of this work, for whoever asks what became of them."""


Loop = Callable[[Work, Mode, Device], Pass]


def undeclared(mode: Mode, device: Device) -> str:
    """Why this device cannot train in this mode; empty where it can."""
    declared = device.accel.capabilities
    dtype = _DTYPES.get(mode.precision)
    if dtype is not None and str(dtype).removeprefix("torch.") not in declared.autocast_dtypes:
        return f"{device.accel.name} declares no autocast to {mode.precision} here"
    if mode.fp32 == "fast" and declared.fast_fp32 != "tf32":
        return f"{device.accel.name} declares no TF32 here"
    if mode.graph and not declared.graphs:
        return f"{device.accel.name} cannot capture steps"
    return ""


def by_hand(work: Work, mode: Mode, device: Device) -> Pass:
    """As one would write it with torch for exactly this mode."""
    model = work.model if mode.compile is None else torch.compile(work.model, **mode.compile)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
    autocast = _autocast(mode, device)

    def plain() -> Tensor:
        with arithmetic(mode.fp32):
            for batch in work.batches:
                optimizer.zero_grad()
                loss = work.loss(model, batch)
                loss.backward()
                optimizer.step()
        return loss.detach()

    def cast() -> Tensor:
        for batch in work.batches:
            optimizer.zero_grad()
            with autocast():
                loss = work.loss(model, batch)
            loss.backward()
            optimizer.step()
        return loss.detach()

    scaler = torch.amp.GradScaler(device.type, enabled=mode.precision == "fp16")

    def scaled() -> Tensor:
        for batch in work.batches:
            optimizer.zero_grad()
            with autocast():
                loss = work.loss(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return {"fp32": plain, "bf16": cast, "fp16": scaled}[mode.precision]


def captured_by_hand(work: Work, mode: Mode, device: Device) -> Pass:
    """The whole step as a CUDA graph, as torch's notes on CUDA have it: warm up, capture, copy and replay.

    The first steps are trained eagerly on the batches they belong to, so that the training is the others'.
    """
    model = work.model if mode.compile is None else torch.compile(work.model, **mode.compile)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True, capturable=True)
    autocast = _autocast(mode, device)
    graph = torch.cuda.CUDAGraph()
    static = tuple(torch.empty_like(tensor) for tensor in work.batches[0])
    captured: list[Tensor] = []
    eager = work.batches[:WARM_UP]

    def step(batch: Batch) -> Tensor:
        with autocast():
            loss = work.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def prepare() -> tuple[Tensor, Sequence[Batch]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in eager:
                optimizer.zero_grad()
                loss = step(batch)
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()  # so that the captured backward allocates gradients of the graph's own
        with torch.cuda.graph(graph):
            captured.append(step(static))
        return loss, work.batches[len(eager) :]

    def train() -> Tensor:
        loss, batches = (captured[0], work.batches) if captured else prepare()
        for rows, targets in batches:
            static[0].copy_(rows)
            static[1].copy_(targets)
            graph.replay()
            loss = captured[0].clone()  # the next replay overwrites the original
        return loss

    return train


def with_trainer(work: Work, mode: Mode, device: Device, **options: Any) -> Pass:
    """`trainer(batch)`, with the options of the mode and others."""
    accel = device.accel
    optimizer = accel.optimizers.create("adamw", work.model.parameters(), lr=work.lr, route="fused")
    trainer = accel.trainer(
        work.model,
        optimizer,
        **{
            "loss": work.loss,
            "precision": mode.precision,
            "fp32": mode.fp32,
            "compile": False if mode.compile is None else dict(mode.compile),
            "graph": mode.graph,
            **options,
        },
    )
    work.kept.append(trainer)

    def train() -> Tensor:
        for batch in work.batches:
            loss = trainer(batch)
        return loss

    return train


def accelerate(work: Work, mode: Mode, device: Device) -> Pass:
    """accelerate as its guide begins: `prepare` and `backward`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import TorchDynamoPlugin

    # One process has one state, and refuses a second precision; here no two precisions are measured at once.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=not device.cuda,
        mixed_precision={"fp32": "no", "bf16": "bf16"}[mode.precision],
        dynamo_plugin=None if mode.compile is None else TorchDynamoPlugin(**{"backend": "inductor", **mode.compile}),
    )
    optimizer: Any = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
    model, optimizer = accelerator.prepare(work.model, optimizer)

    def train() -> Tensor:
        for batch in work.batches:
            optimizer.zero_grad()
            loss = work.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
        return loss.detach()

    return train


def fabric(work: Work, mode: Mode, device: Device) -> Pass:
    """Lightning Fabric: `setup` and `backward`."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it announces the precision each time
    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[mode.precision]
    # Named, or Fabric looks for MPI, and fails where mpi4py is installed without an MPI library.
    alone = LightningEnvironment()
    lightning: Any = Fabric(accelerator=device.type, devices=1, precision=precision, plugins=[alone])
    optimizer: Any = torch.optim.AdamW(work.model.parameters(), lr=work.lr, fused=True)
    model: Any = work.model if mode.compile is None else torch.compile(work.model, **mode.compile)
    model, optimizer = lightning.setup(model, optimizer)

    def train() -> Tensor:
        for batch in work.batches:
            optimizer.zero_grad()
            loss = work.loss(model, batch)
            lightning.backward(loss)
            optimizer.step()
        return loss.detach()

    return train


PEERS: Mapping[str, tuple[Loop, str]] = {
    "accelerate": (accelerate, "accelerate"),
    "Lightning Fabric": (fabric, "lightning_fabric"),
}
"""Other libraries' loops, in fp32 or bf16 and eager or compiled, each with the module that it needs."""


@contextmanager
def arithmetic(fp32: str | None) -> Iterator[None]:
    """Exactness of fp32 products by torch's legacy switches, put back afterwards: cases take turns."""
    if fp32 is None:
        yield
        return
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if fp32 == "fast" else "highest")
    torch.backends.cudnn.allow_tf32 = fp32 == "fast"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


def _autocast(mode: Mode, device: Device) -> Callable[[], AbstractContextManager[object]]:
    dtype = _DTYPES.get(mode.precision)
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype)
