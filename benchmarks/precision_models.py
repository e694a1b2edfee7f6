"""What the benchmark of precision trains: a small GPT on the standard library's text, a ResNet-18 of 32 x 32 pixels.

Free of accelcore: a process in which torch is as it comes makes them, too.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from benchmarks.gpu.gpt import GPT, Shape

__all__ = ["HAND_BF16", "HAND_FP32", "TASKS", "Batch", "Task", "by_hand", "text"]

HAND_FP32, HAND_BF16 = "by hand: fp32", "by hand: torch.autocast to bf16"
GPT_SHAPE = Shape(layers=4, heads=4, width=256, context=128, vocabulary=256)
LR = 1e-4

Batch = tuple[Tensor, Tensor]
Task = Callable[[], tuple[nn.Module, Batch]]


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        shortcut = (nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        inner = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al., 2015, with a first layer for small images; given images and classes, the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, channels = [], width
        for stage in range(4):
            for stride in (2 if stage else 1, 1):
                blocks.append(Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(channels, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))).float(), classes)


def text(size: int) -> Tensor:
    """So many bytes of the standard library's modules, as tokens."""
    found = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= size:
            break
    return torch.frombuffer(bytearray(found[:size]), dtype=torch.uint8).long()


def gpt(rows: int = 8, shape: Shape = GPT_SHAPE) -> tuple[nn.Module, Batch]:
    """A GPT of 3.3 million parameters, and a batch of 8 x 128 bytes of text."""
    torch.manual_seed(0)
    tokens = text(400_000)
    starts = torch.randint(len(tokens) - shape.context - 1, (rows,))
    taken = torch.stack([tokens[start : start + shape.context + 1] for start in starts])
    return GPT(shape), (taken[:, :-1].contiguous(), taken[:, 1:].contiguous())


def resnet(rows: int = 16, width: int = 64) -> tuple[nn.Module, Batch]:
    """A ResNet-18 of 11 million parameters, and a batch of 16 images, all in channels_last."""
    torch.manual_seed(0)
    images = torch.randn(rows, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    return ResNet18(width).to(memory_format=torch.channels_last), (images, torch.randint(10, (rows,)))


TASKS: Mapping[str, Task] = {"GPT, 4 layers of 256": gpt, "ResNet-18, 32 x 32 pixels": resnet}


def by_hand(task: str) -> Mapping[str, Callable[[], None]]:
    """The training steps of a task as one writes them with torch."""
    torch.set_num_threads(1)
    low = torch.autocast("cpu", torch.bfloat16)
    return {HAND_FP32: _step(task, nullcontext()), HAND_BF16: _step(task, low)}


def _step(task: str, context: AbstractContextManager[object]) -> Callable[[], None]:
    model, batch = TASKS[task]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        with context:
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
