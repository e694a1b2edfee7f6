"""Ten small models of different kinds, each with batches and a loss, in which faults are planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Scale", "Task"]

ROWS, WIDTH, LENGTH, WORDS = 8, 16, 8, 32


@dataclass(frozen=True)
class Task:
    """A model to train: how to make it, a batch of it, and its loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class Scale(nn.Module):
    """Multiply each channel by a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Attention(nn.Module):
    """Self-attention of two heads, written out."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (WIDTH // 2) ** 0.5
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(mask, -1e4)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.scale, self.drop = Attention(causal=causal), Scale(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.scale(self.attention(self.first(x))))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(WORDS, WIDTH), Block(causal=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(x)).mean(1))


class Recurrent(nn.Module):
    """An Elman network, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], WIDTH, device=x.device)
        for step in range(4):
            state = torch.tanh(self.enter(x[:, step]) + self.again(state))
        return self.head(state)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # oneDNN's has no bf16 on some processors
            found, _ = self.lstm(self.tokens(x))
        return self.head(self.drop(found)).flatten(0, 1)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.norm = nn.EmbeddingBag(WORDS, WIDTH, mode="sum"), nn.LayerNorm(WIDTH)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.bag(x))))


class Mixture(nn.Module):
    """Four experts, mixed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(WIDTH, 4), Scale(WIDTH)
        self.experts, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        mixed = sum(share[:, number, None] * expert(x).relu() for number, expert in enumerate(self.experts))
        return self.head(self.scale(mixed))


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.2), Scale(32), nn.LayerNorm(32), nn.Linear(32, 4)
    )


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(72, 4),
    )  # fmt: skip


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), Scale(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, stride=2), nn.Tanh()
    )


def _numbers(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(ROWS, *shape, generator=draw), torch.randint(4, (ROWS,), generator=draw)

    return batch


def _words(count: int, *, every: bool) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (ROWS, LENGTH) if every else (ROWS,)
        return torch.randint(WORDS, (ROWS, LENGTH), generator=draw), torch.randint(count, shape, generator=draw)

    return batch


def _pictures(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 8, 1, 1, generator=draw), torch.rand(ROWS, 3, 8, 8, generator=draw)


def _itself(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, WIDTH, generator=draw)
    return rows, rows


def _entropy(found: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(found.float(), target.flatten())


def _square(found: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(found.float(), target)


MODELS = {
    "mlp": Task(_mlp, _numbers(WIDTH), _entropy),
    "conv": Task(_conv, _numbers(3, 8, 8), _entropy),
    "gpt": Task(Gpt, _words(WORDS, every=True), _entropy),
    "rnn": Task(Recurrent, _numbers(4, WIDTH), _entropy),
    "lstm": Task(Tagger, _words(4, every=True), _entropy),
    "autoencoder": Task(_autoencoder, _itself, _square),
    "generator": Task(_generator, _pictures, _square),
    "bags": Task(Bags, _words(4, every=False), _entropy),
    "encoder": Task(Encoder, _words(4, every=False), _entropy),
    "mixture": Task(Mixture, _numbers(WIDTH), _entropy),
}
