"""The section of docs/measurements.md about precision: `python -m benchmarks.draw_precision [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.section import Results, Section, grid, ran_on, verdict

__all__ = ["SECTION"]


def _body(results: Results) -> str:
    parts = [f"{ran_on(results)}; one thread, processor time."]
    for table in results["tables"]:
        learned = all(row["timing"] is None for row in table["rows"])
        parts += [f"### {table['title']}", _learned(table) if learned else _timed(table)]
        if table["goals"]:
            parts.append(verdict(table["goals"]))
    return "\n\n".join(parts)


def _timed(table: Mapping[str, Any]) -> str:
    lines = []
    for row in table["rows"]:
        seconds, ratio = row["timing"]["seconds"], row["timing"]["ratio"]
        quartiles = f"{ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}"
        lines.append([row["case"], f"{1e3 * seconds['median']:.2f}", f"{ratio['median']:.3f}", quartiles, row["note"]])
    return grid(["case", "ms", f"to {table['base']}", "quartiles", ""], lines)


def _learned(table: Mapping[str, Any]) -> str:
    """The mean over seeds, and each seed's."""
    seeds = [name for name in table["rows"][0]["counts"] if name != "mean"]
    lines = [[row["case"], *(f"{row['counts'][name]:g}" for name in ("mean", *seeds))] for row in table["rows"]]
    return grid(["precision", "mean", *seeds], lines)


SECTION = Section("precision", "benchmarks.draw_precision", _body)

if __name__ == "__main__":
    sys.exit(SECTION.main())
