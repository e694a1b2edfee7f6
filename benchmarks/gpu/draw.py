"""The page of measurements, drawn from the results: `python -m benchmarks.gpu.draw [--check]`.

Reads benchmarks/results/gpu-*.json, writes the tables between two markers of docs/measurements.md, and a plot beside
it. Exit status: 0 written, or as it should be; 1 with --check where the page is not what would be written; 2 where a
file comes from a rehearsal, or is none of ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import FAILED, Results

__all__ = ["BEGIN", "END", "NOTHING", "RefusedError", "draw", "load", "main", "page"]

BEGIN, END = "<!-- measurements: begin -->", "<!-- measurements: end -->"
NOTHING = "Not yet on hardware: there are no results to show."
PLOT = "measurements.svg"
_ROOT = Path(__file__).resolve().parents[2]
# A value's name in the JSON, its heading, and how it is written.
_VALUES = {
    "tokens_per_second": ("tokens/s", "{:,.0f}", 1.0),
    "images_per_second": ("images/s", "{:,.0f}", 1.0),
    "utilisation": ("utilisation", "{:.1%}", 1.0),
    "bytes_per_second": ("GB/s", "{:,.0f}", 1e-9),
    "share_of_copy": ("of a copy", "{:.0%}", 1.0),
    "loss": ("loss", "{:.4f}", 1.0),
    "peak_memory_bytes": ("peak memory", "{:.2f} GiB", 2.0**-30),
    "seconds": ("seconds", "{:.2f}", 1.0),
    "host_microseconds_a_step": ("host, µs a step", "{:,.0f}", 1.0),
    "microseconds_a_step": ("µs a step", "{:,.0f}", 1.0),
    "kernels_a_step": ("kernels a step", "{:.0f}", 1.0),
    "launches_a_step": ("launches a step", "{:.0f}", 1.0),
    "idle_share": ("GPU idle", "{:.0%}", 1.0),
    "overlapped_copies": ("copies beside kernels", "{:.0%}", 1.0),
}
_PLOTTED = {"gpt": "tokens_per_second", "resnet": "images_per_second"}
_VERSIONS = (
    "torch",
    "cuda",
    "cudnn",
    "nccl",
    "triton",
    "python",
    "accelerate",
    "lightning-fabric",
    "pytorch-lightning",
)
_TITLES = {
    "step": "Step of a tiny model",
    "gpt": "GPT-2 124M",
    "resnet": "ResNet-50",
    "precision": "Precisions",
    "optimizers": "Optimizers",
    "batches": "GPT-2 124M at small batches and at the full one",
    "options": "What options cost",
    "profile": "Launches and idle time",
    "start": "Until the first step",
    "feed": "Feeding from host memory",
    "checkpoint": "Saving and resuming",
}


class RefusedError(ValueError):
    """A file that must not be shown."""


def load(folder: Path) -> list[Results]:
    """Every result in the folder.

    Raises:
        RefusedError: one comes from a rehearsal, or is not one of results.
    """
    found = []
    for path in sorted(folder.glob("gpu-*.json")):
        try:
            results = Results(path)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if results.rehearsal:
            raise RefusedError(f"{path} comes from a rehearsal: its numbers mean nothing, and are not shown")
        found.append(results)
    return found


def page(before: str, found: Sequence[Results]) -> str:
    """The page with what is between its markers written anew."""
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise RefusedError(f"the page lacks {BEGIN} or {END}")
    body = "\n\n".join(_chip(results) for results in found) if found else NOTHING
    if _plotted(found):
        body = f"![Speed by mode, by hand and by the trainer]({PLOT})\n\n{body}"
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def draw(found: Sequence[Results], path: Path) -> None:
    """The plot: each loop in every mode, for each chip and model; a line is from quartile to quartile."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "accelcore"  # the same file from the same results
    measured = [
        (results, stage, [case for case in results.stages.get(stage, {"cases": []})["cases"] if case["timing"]])
        for results in found
        for stage in _PLOTTED
    ]
    panels = [panel for panel in measured if panel[2]]
    figure = Figure(figsize=(12, 4 * len(panels)), layout="constrained")
    for place, (results, stage, cases) in enumerate(panels):
        value = _PLOTTED[stage]
        axes = figure.add_subplot(len(panels), 1, place + 1)
        _bars(axes, cases, value)
        axes.set(title=f"{_TITLES[stage]}, {_name(results)}", xlabel=_VALUES[value][0])
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.draw", description=__doc__)
    parser.add_argument("--results", type=Path, default=_ROOT / "benchmarks/results", help="folder of gpu-*.json")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs/measurements.md", help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing: only say whether the page is as it should")
    options = parser.parse_args(arguments)
    try:
        found = load(options.results)
        before = options.page.read_text(encoding="utf-8")
        after = page(before, found)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        if before != after:
            print(f"{options.page} is not what its results say: python -m benchmarks.gpu.draw", file=sys.stderr)
        return int(before != after)
    if _plotted(found):
        draw(found, options.page.with_name(PLOT))
    options.page.write_text(after, encoding="utf-8")
    print(f"{options.page}: {', '.join(_name(results) for results in found) or NOTHING}")
    return 0


def _plotted(found: Iterable[Results]) -> bool:
    return any(results.stages.get(stage, {}).get("cases") for results in found for stage in _PLOTTED)


def _name(results: Results) -> str:
    """The chip, as the first stage that knows it says."""
    return next(
        (record["machine"]["chip"] for record in results.stages.values() if "machine" in record), "unknown chip"
    )


def _chip(results: Results) -> str:
    parts = [f"### {_name(results)}"]
    for stage, record in results.stages.items():
        parts.append(_stage(stage, record))
    return "\n\n".join(parts)


def _stage(stage: str, record: Mapping[str, Any]) -> str:
    parts = [f"#### {_TITLES.get(stage, stage.capitalize())}", _circumstances(record)]
    if stage == "tests" and "passed" in record["settings"]:
        counts = record["settings"]
        parts.append(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped.")
    if record["cases"]:
        parts.append(_table(record["cases"]))
    if record["settings"].get("ceiling_operations_per_second"):
        ceiling = record["settings"]["ceiling_operations_per_second"]
        parts.append(
            f"Measured bf16 matmul ceiling: {ceiling / 1e12:,.0f} TFLOP/s. Batch: {record['settings']['batch']}."
        )
    lines = _goals(record["goals"])
    if record["status"] == FAILED:
        lines += [f"- **failed**: {_escaped(failure)}" for failure in record["failures"]]
    if lines:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _goals(goals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each missed goal, and one for all met goals that differ only in their subject."""
    lines = [f"- **missed**: {goal['text']}" for goal in goals if not goal["met"]]
    same: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for goal in goals:
        if goal["met"]:
            same.setdefault((goal["what"].rpartition(": ")[2], goal["bound"]), []).append(goal)
    for (question, bound), met in same.items():
        found = sorted(goal["measured"] for goal in met)
        bounded = f"{'>=' if met[0]['at_least'] else '<='} {bound:g}"
        several = f"met by {len(met)} cases: {question} {bounded}, measured {found[0]:.4g} to {found[-1]:.4g}"
        lines.append(f"- {several}" if met[1:] else f"- met: {met[0]['text']}")
    return lines


def _circumstances(record: Mapping[str, Any]) -> str:
    if "machine" not in record:
        return "Ended without a word of the machine."
    machine = record["machine"]
    versions = machine["versions"]
    named = [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name, "not installed") != "not installed"]
    return f"{record['date']}, driver {machine.get('driver', 'unknown')}, {', '.join(named)}."


def _table(cases: Sequence[Mapping[str, Any]]) -> str:
    values = [name for name in _VALUES if any(name in case["values"] for case in cases)]
    headings = ["mode", "loop", "ms a step", "quartiles", "n", "ratio", *(_VALUES[name][0] for name in values)]
    lines = [headings, ["---"] * len(headings)]
    for case in cases:
        lines.append([case["table"], case["name"], *_times(case), *(_value(case, name) for name in values)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(case: Mapping[str, Any]) -> list[str]:
    if case["timing"] is None:
        return [_escaped(case["note"]), "", "", ""]
    seconds, ratio = case["timing"]["seconds"], case["timing"]["ratio"]
    low, high = (1e3 * seconds[name] for name in ("lower_quartile", "upper_quartile"))
    median = 1e3 * seconds["median"]
    return [f"{median:.4g}", f"{low:.4g} to {high:.4g}", str(case["samples"]), f"{ratio['median']:.3f}"]


def _value(case: Mapping[str, Any], name: str) -> str:
    _, written, factor = _VALUES[name]
    return written.format(factor * case["values"][name]) if name in case["values"] else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _bars(axes: Any, cases: Sequence[Mapping[str, Any]], value: str) -> None:
    for place, case in enumerate(cases):
        seconds, speed = case["timing"]["seconds"], case["values"][value]
        colour = "tab:blue" if case["name"] == "trainer" else "tab:gray"
        axes.barh(place, speed, color=colour)
        quartiles = [speed * seconds["median"] / seconds[name] for name in ("upper_quartile", "lower_quartile")]
        axes.plot(quartiles, [place, place], color="black")
    axes.set_yticks(range(len(cases)), [f"{case['table']}, {case['name']}" for case in cases])
    axes.invert_yaxis()


if __name__ == "__main__":
    sys.exit(main())
