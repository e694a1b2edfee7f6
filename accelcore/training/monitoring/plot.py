"""Plots of logs: each figure of the runs in a panel of its own, as an image or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from accelcore.errors import ConfigurationError
from accelcore.training.monitoring.records import Record, columns
from accelcore.util.html import write_page
from accelcore.util.text import replace_file

_BYTES, _FILE = "memory_peak", "plot.png"


def check_matplotlib() -> None:
    """Raise ConfigurationError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "a plot needs matplotlib, which is not installed", remedy="pip install '.[plot]' in a clone of accelcore"
        )


def file_for(folders: Sequence[Path]) -> Path:
    """Return the file for a plot of these logs: beside the log of one run; of several, a new one here."""
    if len(folders) == 1:
        return (folders[0].parent if folders[0].is_file() else folders[0]) / _FILE
    if Path(_FILE).exists():
        raise ConfigurationError(f"there is a {_FILE} here", remedy=f"name another file, or replace it: -o {_FILE}")
    return Path(_FILE)


def draw(runs: Mapping[str, Sequence[Record]], *paths: Path) -> None:
    """Draw the records of runs, by name, and write the plot to files, each at once.

    `paths` end in .png, .svg, .pdf, or .html: a page that loads nothing from elsewhere.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    of_runs = {run: columns(records) for run, records in runs.items()}
    figures = list(dict.fromkeys(name for found in of_runs.values() for name in found))
    if not figures:
        raise ConfigurationError(
            f"there is nothing to plot: the log of {', '.join(runs)} is empty",
            remedy="train first, or give another run",
        )
    height = -(-len(figures) // 2)
    figure = Figure(figsize=(12, 3 * height), layout="constrained")
    for axes, name in zip(figure.subplots(height, 2, squeeze=False).flat, figures, strict=False):
        for number, (run, found) in enumerate(of_runs.items()):
            steps, values = found.get(name, ([], []))
            if name == _BYTES:
                values = [value / 2**20 for value in values]
            marker = "." if len(steps) < 50 else None
            axes.plot(steps, values, color=f"C{number}", marker=marker, linewidth=1, label=run)
        axes.set(title=name.replace("_", " ") + ", MiB" * (name == _BYTES), xlabel="step")
        axes.grid(alpha=0.3)
        if len(runs) > 1:
            axes.legend(fontsize="small")
    for empty in figure.axes[len(figures) :]:
        empty.set_axis_off()
    for path in paths:
        kind = path.suffix.lower().removeprefix(".")
        content = BytesIO()
        try:
            figure.savefig(content, format="svg" if kind == "html" else kind, dpi=100)
            if kind == "html":
                svg = content.getvalue().decode()
                write_page(path, ", ".join(runs), [svg[svg.index("<svg") :]])
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content.getvalue())
        except ValueError as error:
            raise ConfigurationError(
                f"a plot cannot be written to {path}", why=str(error), available=".png, .svg, .pdf, .html"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"a plot cannot be written to {path}", why=str(error), remedy="name a file in a folder of yours"
            ) from None
