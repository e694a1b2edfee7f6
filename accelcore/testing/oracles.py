"""What the suite compares with: plain torch on the CPU, most of it in float64. None of it is accelcore's own code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["ExactHead", "Stateful", "batches", "buffers", "eps", "error", "evaluated", "network", "weights"]


def eps(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number in `dtype`."""
    return torch.finfo(dtype).eps


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value; inf where shapes or finiteness differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(found.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / (scale or 1.0) if found.numel() else 0.0


def network(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """A small classifier of 8 features into 4 classes, the same for the same seed, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


class Stateful(nn.Module):
    """The classifier of `network` with every kind of state that a model may have, all of which its answers depend on.

    Running statistics of two batch norms, a buffer that is updated in forward and is in no `state_dict`, a weight that
    two layers share, a convolution, dropout, a parameter that is frozen. The same for the same seed, on
    the CPU.
    """

    shift: Tensor

    def __init__(self, *, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.entry = nn.Linear(8, 16)
            self.image = nn.Conv2d(4, 4, 3, padding=1)
            self.image_norm, self.norm = nn.BatchNorm2d(4), nn.BatchNorm1d(16)
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.second.weight = self.first.weight
            self.drop, self.exit = nn.Dropout(dropout), nn.Linear(16, 4)
        self.exit.bias.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(16), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of 4 classes."""
        image = self.entry(rows).view(-1, 4, 2, 2)
        hidden = self.norm(nn.functional.gelu(self.image_norm(self.image(image))).flatten(1))
        hidden = nn.functional.gelu(self.first(hidden))
        if self.training:
            with torch.no_grad():
                self.shift += 0.1 * (hidden.to(self.shift.dtype).mean(0) - self.shift)
        logits: Tensor = self.exit(self.drop(self.second(hidden - self.shift.to(hidden.dtype))))
        return logits


class ExactHead(nn.Module):
    """A classifier whose last layer asks for fp32 also under autocast, as one whose gradients overflow fp16 does.

    The same each time, on the CPU.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
            nn.init.normal_(self.head.weight, std=0.01)  # behind it, gradients are small again
        self._exact = partial(torch.autocast, device_type, enabled=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of 4 classes, in fp32."""
        hidden = torch.relu(self.body(rows))
        with self._exact():
            logits: Tensor = self.head(hidden.float())
        return logits


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name, those in no `state_dict`, too, on the CPU in float64."""
    return {name: buffer.detach().cpu().double().clone() for name, buffer in model.named_buffers()}


def evaluated(model: nn.Module, device: torch.device) -> Tensor:
    """The logits of a model in evaluation, on data that was not trained on, on the CPU in float64."""
    training, dtype = model.training, next(model.parameters()).dtype
    model.eval()
    with torch.no_grad():
        logits = [model(rows.to(device, dtype)).cpu().double() for rows, _ in batches(4, 32, seed=99)]
    model.train(training)
    return torch.cat(logits)


def batches(count: int, rows: int = 16, *, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and classes that can be learned, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, rows, 8, generator=generator)
    return [(rows_, rows_[:, :4].argmax(1)) for rows_ in inputs]


def weights(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Copies of all parameters, on the CPU in float64."""
    parameters: Sequence[Tensor] = list(model.parameters() if isinstance(model, nn.Module) else model)
    return [parameter.detach().cpu().double().clone() for parameter in parameters]
