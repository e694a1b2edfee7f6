"""Small trainings with something to learn, the same numbers on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.gpu.device import Device
from benchmarks.gpu.gpt import GPT, Shape
from benchmarks.gpu.loops import Work
from benchmarks.gpu.resnet import ResNet

__all__ = ["BATCHES", "gpt", "resnet"]

BATCHES = 10
_LR = 1e-3


def gpt(device: Device) -> Work:
    """Each token follows from the one before it, but one in ten is any token."""
    small, batch = (Shape(1, 2, 16, 16, 32), 4) if device.toy else (Shape(4, 8, 512, 256, 1024), 64)
    random = torch.Generator().manual_seed(0)
    tokens = torch.empty(BATCHES, batch, small.context + 1, dtype=torch.long)
    anything = torch.randint(small.vocabulary, tokens.shape, generator=random)
    surprising = torch.rand(tokens.shape, generator=random) < 0.1
    tokens[..., 0] = anything[..., 0]
    for place in range(1, tokens.shape[-1]):
        expected = (5 * tokens[..., place - 1] + 17) % small.vocabulary
        tokens[..., place] = torch.where(surprising[..., place], anything[..., place], expected)
    tokens = tokens.to(device.torch)
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    torch.manual_seed(0)
    return Work(GPT(small).to(device.torch), _loss_of_model, batches, _LR)


def resnet(device: Device) -> Work:
    """Images of a pattern for each class, under noise."""
    depths, width, size, batch, classes = ((1, 1), 4, 16, 4, 4) if device.toy else ((2, 2, 2, 2), 64, 64, 128, 100)
    random = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, 3, size, size, generator=random)
    batches = []
    for _ in range(BATCHES):
        targets = torch.randint(classes, (batch,), generator=random)
        images = 0.3 * patterns[targets] + torch.randn(batch, 3, size, size, generator=random)
        images = images.to(device.torch, memory_format=torch.channels_last)
        batches.append((images, targets.to(device.torch)))
    torch.manual_seed(0)
    model = ResNet(depths, classes, width).to(device.torch, memory_format=torch.channels_last)
    return Work(model, _loss_of_scores, batches, _LR)


def _loss_of_model(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch)


def _loss_of_scores(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
