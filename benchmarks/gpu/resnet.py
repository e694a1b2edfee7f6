"""ResNet-50, as torchvision has it: the stride in the 3 x 3 convolution (version 1.5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["RESNET_50", "ResNet"]

RESNET_50 = (3, 4, 6, 3)
"""Bottlenecks a stage."""

_EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1 to `width` channels, 3 x 3, 1 x 1 to four times as many, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = _EXPANSION * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )  # fmt: skip
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images to class scores.

    Args:
        depths: bottlenecks a stage; each stage halves the image but the first.
        width: channels of the first stage's inner convolution.
    """

    def __init__(self, depths: Sequence[int], classes: int, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        )  # fmt: skip
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for number in range(depth):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not number else 1))
                channels = _EXPANSION * inner
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(images))).flatten(1))


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(out)
