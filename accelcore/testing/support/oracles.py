"""Reference models and results in plain torch on the CPU, mostly in float64, without accelcore's code; overflow and
launches on a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def eps(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number in `dtype`."""
    return torch.finfo(dtype).eps


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; inf if shapes or finiteness differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(found.isfinite().all()):
        return float("inf")
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return float((found - expected).abs().max()) / (scale or 1.0) if found.numel() else 0.0


def network(*, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """Return a small classifier of 8 features into 4 classes, the same for the same seed, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


class Stateful(nn.Module):
    """Classifier of `network` with every kind of state that a model may have, and outputs that depend on all of it.

    Running statistics of two batch norms, a non-persistent buffer that forward updates, a weight that two layers
    share, a convolution, dropout, a frozen parameter. The same for the same seed, on the CPU.
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
        """Return logits of 4 classes."""
        image = self.entry(rows).view(-1, 4, 2, 2)
        hidden = self.norm(nn.functional.gelu(self.image_norm(self.image(image))).flatten(1))
        hidden = nn.functional.gelu(self.first(hidden))
        if self.training:
            with torch.no_grad():
                self.shift += 0.1 * (hidden.to(self.shift.dtype).mean(0) - self.shift)
        logits: Tensor = self.exit(self.drop(self.second(hidden - self.shift.to(hidden.dtype))))
        return logits


class ExactHead(nn.Module):
    """Classifier whose last layer disables autocast, because its gradients overflow fp16.

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
        """Return logits of 4 classes, in fp32."""
        hidden = torch.relu(self.body(rows))
        with self._exact():
            logits: Tensor = self.head(hidden.float())
        return logits


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all buffers by name, also non-persistent ones, on the CPU in float64."""
    return {name: buffer.detach().cpu().double().clone() for name, buffer in model.named_buffers()}


def evaluated(model: nn.Module, device: torch.device) -> Tensor:
    """Return the logits of a model in evaluation on unseen data, on the CPU in float64."""
    training, dtype = model.training, next(model.parameters()).dtype
    model.eval()
    with torch.no_grad():
        logits = [model(rows.to(device, dtype)).cpu().double() for rows, _ in batches(4, 32, seed=99)]
    model.train(training)
    return torch.cat(logits)


def batches(count: int, rows: int = 16, *, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and classes that can be learned, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, rows, 8, generator=generator)
    return [(rows_, rows_[:, :4].argmax(1)) for rows_ in inputs]


def weights(model: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    """Return copies of all parameters, on the CPU in float64."""
    parameters: Sequence[Tensor] = list(model.parameters() if isinstance(model, nn.Module) else model)
    return [parameter.detach().cpu().double().clone() for parameter in parameters]


def overflow(device: torch.device) -> Tensor:
    """Compute a number too large for fp32: inf, or the largest number and the overflow flag on a device that clamps."""
    largest = torch.full((), torch.finfo(torch.float32).max, device=device)
    return largest * largest


def spoil(parameter: nn.Parameter, value: float, element: int = -1) -> None:
    """Make an element of a gradient inf, -inf or NaN, by arithmetic of the device."""
    assert parameter.grad is not None
    found = overflow(parameter.device)
    parameter.grad[element] = found - found if math.isnan(value) else math.copysign(1.0, value) * found


class Launches(TorchDispatchMode):
    """Collects the names of the operators that compute on a device, without the host's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._kind = device.type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) and leaf.device.type == self._kind for leaf in leaves):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
