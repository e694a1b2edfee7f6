"""What a benchmark found: tables with goals, on the screen and as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.paired import Spread, Timing

__all__ = ["Goal", "Row", "Table", "print_table", "write_results"]

_UNITS = {"µs": 1e6, "ms": 1e3, "s": 1.0}
_HEADINGS = ("case", "median", "ratio", "quartiles", "range", "")


@dataclass(frozen=True)
class Goal:
    """A ratio that must not be exceeded."""

    what: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


@dataclass(frozen=True)
class Row:
    """One case of a table.

    Attributes:
        timing: None where the case did not run, or was counted instead of timed; `note` says why.
        note: what else there is to say about it.
        counts: what was counted, by name.
    """

    case: str
    timing: Timing | None
    note: str = ""
    counts: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Table:
    """Cases compared with one of them, the base.

    Attributes:
        unit: of the printed times: "µs", "ms" or "s". In JSON they are in seconds.
        settings: what the numbers hang on, beside machine and versions.
    """

    title: str
    base: str
    unit: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    goals: Sequence[Goal] = ()


def print_table(table: Table) -> None:
    """Print with rich on a terminal where rich is installed, in plain columns otherwise."""
    lines = [_cells(row, table.unit) for row in table.rows]
    if not (sys.stdout.isatty() and _print_rich(table.title, lines)):
        _print_plain(table.title, lines)
    for goal in table.goals:
        verdict = "met" if goal.met else "MISSED"
        print(f"goal {verdict}: {goal.what} <= {goal.limit:g}, measured {goal.measured:.4f}")
    print(flush=True)


def write_results(
    path: Path, *, benchmark: str, quick: bool, machine: Mapping[str, Any], versions: Mapping[str, str],
    tables: Sequence[Table],
) -> None:  # fmt: skip
    """Write everything to one JSON file, which is there whole or not at all."""
    results = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
        "machine": machine,
        "versions": versions,
        "tables": [
            {**asdict(table), "goals": [{**asdict(goal), "met": goal.met} for goal in table.goals]} for table in tables
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cells(row: Row, unit: str) -> tuple[str, ...]:
    if row.timing is None:
        counted = ", ".join(f"{count:g} {what}" for what, count in (row.counts or {}).items())
        return (row.case, "", "", "", "", counted or row.note)
    ratio: Spread = row.timing.ratio
    return (
        row.case,
        f"{row.timing.seconds.median * _UNITS[unit]:.1f} {unit}",
        f"{ratio.median:.3f}",
        f"{ratio.lower_quartile:.3f} to {ratio.upper_quartile:.3f}",
        f"{ratio.smallest:.3f} to {ratio.largest:.3f}",
        row.note,
    )


def _print_plain(title: str, lines: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *lines, strict=True)]
    print(title)
    for line in (_HEADINGS, *lines):
        first, *others = (
            cell.rjust(width) if 0 < place < len(widths) - 1 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join((first, *others)).rstrip())


def _print_rich(title: str, lines: Sequence[tuple[str, ...]]) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        return False
    grid = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(_HEADINGS):
        grid.add_column(heading, justify="right" if 0 < place < len(_HEADINGS) - 1 else "left")
    for line in lines:
        grid.add_row(*line)
    Console(markup=False).print(grid)
    return True
