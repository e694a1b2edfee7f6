"""What the stages found, and the one file that holds it. Free of torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paired import Timing

__all__ = ["DONE", "FAILED", "MISSED", "SCHEMA", "STAGES", "Case", "Findings", "Goal", "Results", "slug"]

SCHEMA = 1
STAGES = (
    "experiments", "tests", "step", "gpt", "batches", "profile", "optimizers",
    "options", "resnet", "start", "feed", "checkpoint", "precision",
)  # fmt: skip
"""The most telling ones first."""
DONE, MISSED, FAILED = "done", "goal missed", "failed"


@dataclass(frozen=True)
class Goal:
    """A number, and the bound it should keep.

    Attributes:
        measured: None where the cases it is made of did not run.
        at_least: whether `bound` is the smallest number that will do; otherwise it is the largest.
    """

    what: str
    bound: float
    measured: float | None
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def __str__(self) -> str:
        found = "not measured" if self.measured is None else f"measured {self.measured:.4g}"
        return f"{self.what} {'>=' if self.at_least else '<='} {self.bound:g}, {found}"


@dataclass(frozen=True)
class Case:
    """One way of doing the work of a table.

    Attributes:
        timing: seconds a step, and the ratio to the table's `base`; None where it did not run, and `note` says why.
        samples: how many times it was timed.
        values: what else was found, by name; units are in the names.
    """

    table: str
    name: str
    timing: Timing | None = None
    samples: int = 0
    base: str = ""
    note: str = ""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """What one stage found.

    Attributes:
        failures: what did not work, a line each; a stage with any has failed.
    """

    settings: Mapping[str, Any]
    cases: Sequence[Case] = ()
    goals: Sequence[Goal] = ()
    failures: Sequence[str] = ()

    def record(self, *, rehearsal: bool) -> dict[str, Any]:
        """As JSON. A rehearsal's goals are not judged: its numbers mean nothing."""
        missed = not rehearsal and not all(goal.met for goal in self.goals)
        return {
            "status": FAILED if self.failures else MISSED if missed else DONE,
            "rehearsal": rehearsal,
            "settings": self.settings,
            "cases": [asdict(case) for case in self.cases],
            "goals": [
                {**asdict(goal), "met": None if rehearsal else goal.met, "text": str(goal)} for goal in self.goals
            ],
            "failures": list(self.failures),
        }


class Results:
    """The file of one chip: the stages' records, each there whole or not at all.

    Args:
        path: read if it exists.

    Raises:
        ValueError: it is not such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stages: dict[str, dict[str, Any]] = {}
        if path.exists():
            held = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(held, dict) or held.get("schema") != SCHEMA or not isinstance(held.get("stages"), dict):
                raise ValueError(f"{path} holds no results of schema {SCHEMA}; move it away")
            self.stages = held["stages"]

    @property
    def rehearsal(self) -> bool:
        """Whether any of it comes from a rehearsal."""
        return any(record["rehearsal"] for record in self.stages.values())

    def finished(self, stage: str) -> bool:
        """Whether this stage ran to its end, whatever it found."""
        return stage in self.stages and self.stages[stage]["status"] != FAILED

    def add(self, stage: str, record: Mapping[str, Any]) -> None:
        """Put a stage's record in, in the place of an earlier one, and write the file."""
        self.stages[stage] = dict(record)
        ordered = {name: self.stages[name] for name in STAGES if name in self.stages}
        held = {"schema": SCHEMA, "rehearsal": self.rehearsal, "stages": ordered}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)


def slug(chip: str) -> str:
    """A chip's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") or "unknown"
