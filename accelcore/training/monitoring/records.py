"""The file of a log: JSON lines, each with the step that it belongs to; and plots of such files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.util.files import write_html, write_output
from accelcore.util.text import is_number, is_whole

FILE = "log.jsonl"
_BYTES, _PLOT = "memory_peak", "plot.png"
_FORMATS = ".png", ".svg", ".pdf", ".html"

Line = Mapping[str, Any]


def read_records(folder: Path) -> list[Line]:
    """Return the lines of a log, by its folder or its file. A last line that a kill has cut off is skipped."""
    path = folder if folder.is_file() and folder.suffix == ".jsonl" else folder / FILE
    try:
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        logs = sorted(str(found.parent) for below in ("*", "*/*") for found in folder.glob(f"{below}/{FILE}"))
        raise ConfigurationError(
            f"there is no log in {folder}",
            why=f"{path}: {error.strerror}",
            available=", ".join(logs[:5]),
            remedy="give the folder that accelcore.Log(folder) was given",
        ) from error
    records: list[Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not is_whole(record["step"]):
                raise TypeError(f"step is {record['step']!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigurationError(
                f"line {number} of {path} is damaged", why=repr(error), remedy="delete it"
            ) from error
        records.append(record)
    return records


def line_of(record: Line) -> str:
    """Return a record as a line of JSON. A number that is not finite becomes null, because JSON has none."""
    return json.dumps(json.loads(json.dumps(record), parse_constant=lambda name: None)) + "\n"


def require(*packages: str) -> None:
    """Raise ConfigurationError if packages are not installed."""
    missing = " ".join(package for package in packages if find_spec(package) is None)
    if missing:
        raise ConfigurationError(f"this needs {missing}, not installed here", remedy=f"pip install {missing}")


def file_for(folders: Sequence[Path]) -> Path:
    """Return the file for a plot of these logs: beside the log of one run; of several, a new one here."""
    if len(folders) == 1:
        return (folders[0].parent if folders[0].is_file() else folders[0]) / _PLOT
    if Path(_PLOT).exists():
        raise ConfigurationError(f"there is a {_PLOT} here", remedy=f"name another file, or replace it: -o {_PLOT}")
    return Path(_PLOT)


def draw(runs: Mapping[str, Sequence[Line]], *paths: Path) -> None:
    """Draw the records of runs, by name, and write the plot to files, each at once.

    `paths` end in .png, .svg, .pdf, or .html: a page that loads nothing from elsewhere.
    """
    require("matplotlib")
    from matplotlib.figure import Figure

    for path in paths:
        if path.is_dir() or path.suffix.lower() not in _FORMATS:
            raise ConfigurationError(f"{path} does not end as a plot does", available=", ".join(_FORMATS))
    of_runs = {run: _columns(records) for run, records in runs.items()}
    figures = list(dict.fromkeys(name for found in of_runs.values() for name in found))
    if not figures:
        raise ConfigurationError(f"the log of {', '.join(runs)} is empty", remedy="train first, or give another run")
    height = -(-len(figures) // 2)
    figure = Figure(figsize=(12, 3 * height), layout="constrained")
    for place, name in enumerate(figures, start=1):
        axes = figure.add_subplot(height, 2, place)
        for number, (run, found) in enumerate(of_runs.items()):
            steps, values = found.get(name, ([], []))
            if name == _BYTES:
                values = [value / 2**20 for value in values]
            axes.plot(steps, values, color=f"C{number}", marker="." if len(steps) < 50 else None, lw=1, label=run)
        axes.set(title=name.replace("_", " ") + ", MiB" * (name == _BYTES), xlabel="step")
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend(fontsize="small")
    for path in paths:
        kind = path.suffix.lower().removeprefix(".")
        content = BytesIO()
        figure.savefig(content, format="svg" if kind == "html" else kind, dpi=100)
        if kind == "html":
            svg = content.getvalue().decode()
            write_html(path, ", ".join(runs), [svg[svg.index("<svg") :]])
        else:
            write_output(path, content.getvalue())


def _columns(records: Sequence[Line]) -> dict[str, tuple[list[int], list[float]]]:
    """Return the steps and values of each figure, in the order of their first lines."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name not in ("step", "epoch", "seconds") and (value is None or is_number(value)):
                steps, values = found.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(math.nan if value is None else value)
    return found
