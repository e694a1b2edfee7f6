"""What each precision learns: not one that is meant to converge may fall out of what the seed alone does to fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import accelcore
from accelcore import Policy
from benchmarks.gpu.gpt import GPT, Shape
from benchmarks.precision_models import text
from benchmarks.report import Goal, Row, Table

__all__ = ["converge"]

BASE = "fp32"
PRESETS: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "fp32 fast": {"fp32": "fast"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "O2 in bf16": {"precision": Policy.preset("O2", dtype="bfloat16")},
}
EPOCHS, BATCH = 6, 64  # of digits
SMALL = Shape(layers=2, heads=2, width=64, context=64, vocabulary=256)


def converge(accel: accelcore.Backend, quick: bool) -> Iterator[Table]:
    """A table of the accuracy on digits, and one of a small GPT's loss, both on what was not trained on."""
    seeds = range(2) if quick else range(5)
    yield _table(
        "Error on digits, %", {name: [_digits(accel, seed, o) for seed in seeds] for name, o in PRESETS.items()}
    )
    steps = 10 if quick else 150
    found = {name: [_text(accel, seed, options, steps) for seed in seeds] for name, options in PRESETS.items()}
    yield _table(f"Loss of a small GPT after {steps} steps, nats a byte", found)


def _table(title: str, found: Mapping[str, Sequence[float]]) -> Table:
    spread = max(found[BASE]) - min(found[BASE])
    rows, goals = [], []
    for name, values in found.items():
        counts = {f"seed {seed}": round(value, 4) for seed, value in enumerate(values)}
        rows.append(Row(name, None, counts={"mean": round(mean(values), 4), **counts}))
        if name != BASE:
            worse = mean(values) - mean(found[BASE])
            goals.append(Goal(f"{title}: {name} above {BASE}, in its spread over seeds", 1.0, worse / spread))
    return Table(title, BASE, "s", {"seeds": len(found[BASE]), f"spread of {BASE}": spread}, rows, goals)


def _digits(accel: accelcore.Backend, seed: int, options: Mapping[str, Any]) -> float:
    """The share of wrong answers, in percent, of a small convolutional network on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.tensor(data.target)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    kept, tested = order[:-500], order[-500:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=2e-3)
    trainer = accel.trainer(
        model, optimizer, loss=lambda m, batch: cross_entropy(m(batch[0]).float(), batch[1]), **options
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in kept[torch.randperm(len(kept))].split(BATCH):
            trainer((images[batch], classes[batch]))
    model.eval()
    with torch.no_grad(), trainer.autocast():
        answers = trainer.forward(images[tested]).argmax(1)
    return 100 * float((answers != classes[tested]).float().mean())


def _text(accel: accelcore.Backend, seed: int, options: Mapping[str, Any], steps: int) -> float:
    tokens = text(400_000)

    def batch(first: int, last: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(first, last - SMALL.context - 1, (16,), generator=generator)
        taken = torch.stack([tokens[start : start + SMALL.context + 1] for start in starts])
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    torch.manual_seed(seed)
    model, generator = GPT(SMALL), torch.Generator().manual_seed(seed)
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), lr=3e-3), **options)
    for _ in range(steps):
        trainer(batch(0, 360_000, generator))
    tested = torch.Generator().manual_seed(99)
    with torch.no_grad(), trainer.autocast():
        return mean(float(trainer.forward(*batch(360_000, 400_000, tested))) for _ in range(8))
