"""The section of docs/measurements.md about optimizers: `python -m benchmarks.draw_optimizers [--check]`.

Reads benchmarks/results/optimizers.json, writes the tables between two markers of the page, and a plot beside it. Exit
status: 0 written, or as it should be; 1 with --check where the page is not what would be written; 2 where the results
are those of a quick run, or none of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizers import FLAT, FLOOR, OWN, PEER, TORCH
from benchmarks.section import Results, Section, grid, ran_on, verdict

__all__ = ["SECTION"]

_MARKS = {OWN: ("tab:blue", "o"), FLAT: ("tab:cyan", "D"), PEER: ("tab:red", "s")}
_MARKS |= {case: (colour, "x") for case, colour in zip(TORCH, ("tab:gray", "tab:olive", "tab:green"), strict=True)}

Tables = Sequence[Mapping[str, Any]]


def draw(results: Results, path: Path) -> None:
    """The plot: nanoseconds a parameter for each optimizer, and a black line where memory sets the limit."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "accelcore"  # the same file from the same results
    groups = _groups(results)
    figure = Figure(figsize=(12, 4 * -(-len(groups) // 2)), layout="constrained")
    for place, (title, tables) in enumerate(groups.items()):
        axes = figure.add_subplot(-(-len(groups) // 2), 2, place + 1)
        for line, table in enumerate(tables):
            for row in _timed(table):
                times = _nanoseconds(table, row)
                if row["case"] == FLOOR:
                    axes.plot([times["median"]] * 2, [line - 0.4, line + 0.4], color="black", label=FLOOR)
                elif row["case"] in _MARKS:
                    colour, mark = _MARKS[row["case"]]
                    axes.plot([times["lower_quartile"], times["upper_quartile"]], [line] * 2, color=colour)
                    axes.plot(times["median"], line, mark, color=colour, linestyle="", label=row["case"])
        axes.set_yticks(range(len(tables)), [table["settings"]["optimizer"] for table in tables])
        axes.invert_yaxis()
        axes.set(title=title, xscale="log", xlabel="ns a parameter")
        axes.grid(axis="x", which="both", alpha=0.2)
    labels: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None})


def _body(results: Results) -> str:
    parts = [
        f"![Time of an update for each optimizer, and what memory allows]({SECTION.plot})",
        f"{ran_on(results)}. In brackets the multiple of the floor.",
    ]
    for title, tables in _groups(results).items():
        goals = [goal for table in tables for goal in table["goals"]]
        parts += [f"### {title}", _table(tables), verdict(goals)]
    return "\n\n".join(parts)


def _groups(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """The tables by size and threads, under a title."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for table in results["tables"]:
        settings = table["settings"]
        threads, tensors = _counted(settings["threads"], "thread"), _counted(settings["tensors"], "tensor")
        title = f"{settings['elements'] / 1e6:.1f} million parameters in {tensors}, {threads}"
        groups.setdefault(title, []).append(table)
    return groups


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count > 1)}"


def _table(tables: Tables) -> str:
    cases = [case for case in (OWN, FLAT, *TORCH, PEER) if any(case in map(_case, _timed(table)) for table in tables)]
    headings = ["optimizer", "route", "floor, ns", *cases]
    lines = []
    for table in tables:
        rows = {_case(row): row for row in _timed(table)}
        route = table["settings"]["routes"].get(OWN, {"route": "none"})["route"]
        floor = f"{_nanoseconds(table, rows[FLOOR])['median']:.3f}"
        cells = [_cell(table, rows[case]) if case in rows else "" for case in cases]
        lines.append([table["settings"]["optimizer"], route, floor, *cells])
    return grid(headings, lines)


def _cell(table: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    return f"{_nanoseconds(table, row)['median']:.3f} ({row['timing']['ratio']['median']:.2f})"


def _case(row: Mapping[str, Any]) -> str:
    return str(row["case"])


def _timed(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in table["rows"] if row["timing"] is not None]


def _nanoseconds(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float]:
    """The spread of a case's time, a parameter."""
    per = 1e9 / table["settings"]["elements"]
    return {name: seconds * per for name, seconds in row["timing"]["seconds"].items()}


SECTION = Section("optimizers", "benchmarks.draw_optimizers", _body, draw)

if __name__ == "__main__":
    sys.exit(SECTION.main())
