"""What the ranks of a job train while their ways of doing so are timed, and that they all train alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import accelcore
from benchmarks.gpu.gpt import GPT, Shape

__all__ = ["TASKS", "Task", "Training", "joined", "loop", "model_of", "repeated", "verify", "with_trainer"]

CHECKED = 3
"""Steps to compare weights after."""


@dataclass(frozen=True)
class Task:
    """What to train.

    Attributes:
        model: makes the model, a module that returns its loss.
        batch: makes a batch.
        steps: how many make a sample.
        goal: what combine_ddp may take of the time by hand.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    steps: int
    goal: float


class Square(nn.Module):
    """The mean square of what layers return."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).square().mean()


def _small() -> nn.Module:
    return Square([layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.LayerNorm(32))])


def _big() -> nn.Module:
    return Square([nn.Linear(1536, 1536) for _ in range(6)])


SMALL_GPT = Shape(layers=4, heads=4, width=256, context=64, vocabulary=512)


def _gpt() -> nn.Module:
    return GPT(SMALL_GPT)


def _tokens() -> tuple[Tensor, ...]:
    tokens = torch.randint(SMALL_GPT.vocabulary, (4, SMALL_GPT.context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TASKS = {
    "400 small tensors": Task(_small, lambda: (torch.randn(8, 32),), 4, 0.80),
    "14M in 6 layers": Task(_big, lambda: (torch.randn(4, 1536),), 1, 1.0),
    "small GPT": Task(_gpt, _tokens, 1, 1.0),
}


@dataclass(frozen=True)
class Training:
    """A way to train.

    Attributes:
        model: what is trained.
        optimizer: which has the state.
        step: trains on one batch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


def model_of(task: Task) -> nn.Module:
    """The same one each time."""
    torch.manual_seed(0)
    return task.model()


def loop(model: nn.Module, replica: nn.Module, batch: tuple[Tensor, ...], lr: float) -> Training:
    """The loop as one writes it, of a model that is called through its replica."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        replica(*batch).backward()
        optimizer.step()

    return Training(model, optimizer, step)


def with_trainer(
    accel: accelcore.Backend, task: Task, batch: tuple[Tensor, ...], lr: float, **options: Any
) -> Training:
    """accelcore's."""
    model = model_of(task)
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=lr)
    trainer = accel.trainer(model, optimizer, **options)
    trainer.epoch = 0  # this loop needs no position in the data
    return Training(model, optimizer, lambda: trainer(batch))


def verify(
    task: Task,
    makers: Mapping[str, Callable[[float], Training]],
    base: str,
    tolerances: Mapping[str, float],
    alone: str,
) -> dict[str, str]:
    """Train with each, and say how alike the weights are to the base's; AssertionError where they are not.

    Args:
        tolerances: how far some may be from those of the base, relative to how far they have come.
        alone: the one that exchanges nothing; it has to end elsewhere.
    """
    start = joined(model_of(task).parameters())
    ends = {name: _trained(make(1e-3)) for name, make in makers.items()}
    way = (ends[base] - start).norm()
    notes = {}
    for name, end in ends.items():
        away = float((end - ends[base]).norm() / way)
        if name in tolerances:
            assert away <= tolerances[name], f"{name} is {away:.1e} of the way from the weights by hand"
            notes[name] = "identical weights" if away == 0 else f"weights {away:.0e} of the way apart"
    # Else ranks had the same data, and a case that exchanges nothing would have passed, too.
    assert float((ends[alone] - ends[base]).norm() / way) > 2 * max(tolerances.values())
    return notes


def joined(weights: Any) -> Tensor:
    """All elements of weights; of divided ones all ranks have to ask."""
    whole = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights)
    return torch.cat([weight.detach().flatten() for weight in whole])


def repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    """So many steps."""

    def repeat() -> None:
        for _ in range(times):
            step()

    return repeat


def _trained(training: Training) -> Tensor:
    for _ in range(CHECKED):
        training.step()
    return joined(training.model.parameters())
