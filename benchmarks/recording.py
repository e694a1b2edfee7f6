"""Cost of a recording: training steps of a small GPT and a ResNet-18 as one writes them, beside recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import accelcore
from benchmarks.paired import compare, sample
from benchmarks.precision_models import LR, TASKS, Task
from benchmarks.report import Goal, Row, Table

__all__ = ["DISTRIBUTIONS", "run"]

DISTRIBUTIONS = ("accelcore", "torch", "safetensors")
PLAIN, AGAIN, RECORDED = "not recorded", "not recorded, again", "recorded"
RATIO_GOAL, MEGABYTE = 1.05, 1e6


def run(quick: bool) -> Iterator[Table]:
    """Yield a table for each model."""
    rounds = 4 if quick else 40
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for title, task in TASKS.items():
            with TemporaryDirectory() as folder:
                yield _table(title, task, Path(folder, "recording"), rounds)
    finally:
        torch.set_num_threads(threads)


def _table(title: str, task: Task, folder: Path, rounds: int) -> Table:
    steps = {name: _Step(task) for name in (PLAIN, AGAIN, RECORDED)}
    recorded = steps[RECORDED]
    with accelcore.Record(folder, model=recorded.model, optimizer=recorded.optimizer):
        timings = compare(sample(steps, rounds=rounds), PLAIN)
    written = [path.stat().st_size for path in folder.rglob("steps-*.safetensors")]
    size = (sum(written) + next(folder.rglob("recording.json")).stat().st_size) / recorded.count
    return Table(
        title=f"{title}: one step",
        base=PLAIN,
        unit="ms",
        settings={"optimizer": "torch.optim.AdamW, fused", "threads": 1, "rounds": rounds, "clock": "perf_counter"},
        rows=[
            Row(PLAIN, timings[PLAIN]),
            Row(AGAIN, timings[AGAIN], "noise floor"),
            Row(RECORDED, timings[RECORDED], f"{size / 1e3:.0f} kB a step"),
        ],
        goals=[
            Goal(f"{title}: {RECORDED} / {PLAIN}", RATIO_GOAL, timings[RECORDED].ratio.median),
            Goal(f"{title}: megabytes a step", 1.0, size / MEGABYTE),
        ],
    )


class _Step:
    """A training step; `count` says how often it was called."""

    def __init__(self, task: Task) -> None:
        self.model, self._batch = task()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        self.count = 0

    def __call__(self) -> None:
        self.model(*self._batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
