"""The result of a replay as one HTML file with plots, which loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from accelcore.errors import ConfigurationError
from accelcore.parity.events import PHASE_OF
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.result import Result
from accelcore.parity.rounding import distance, unit_of

__all__ = ["write_page"]

_WIDTH, _HEIGHT, _EDGE = 640, 220, 48
_COLORS = ("#1f77b4", "#d62728")
_MOST_STEPS = 500

_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: left }}
.tree {{ font-family: monospace }} .tree div {{ padding: .1em .5em }} svg {{ max-width: 100%; height: auto }}
</style>
<h1>{title}</h1><p>{summary}</p>
{body}
</html>
"""


@dataclass
class _Curves:
    """What is plotted, by step: both losses and norms of gradients, and the largest difference in each phase."""

    losses: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    norms: tuple[dict[int, float], dict[int, float]] = field(default_factory=lambda: ({}, {}))
    phases: dict[str, dict[int, float]] = field(default_factory=dict)
    modules: dict[str, float] = field(default_factory=dict)


def write_page(path: Path, result: Result, reference: Path, other: Path) -> None:
    """Write the page of a comparison of two recordings.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    curves = _curves(reference, other, result)
    parts = [_table(result), _settings(result)]
    parts.append(_plot("loss", {"recorded": curves.losses[0], "replayed": curves.losses[1]}))
    parts.append(_plot("norm of all gradients", {"recorded": curves.norms[0], "replayed": curves.norms[1]}))
    parts += [
        _plot(f"largest difference, {phase}, in units of rounding", {"difference": values}, logarithmic=True)
        for phase, values in curves.phases.items()
        if any(values.values())
    ]
    parts.append(_tree(curves.modules, result))
    page = _PAGE.format(title="Record and replay", summary=escape(str(result)), body="\n".join(filter(None, parts)))
    beside = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"the page cannot be written to {path}", why=str(error), remedy="name a file in a folder of yours"
        ) from error


def _curves(reference: Path, other: Path, result: Result) -> _Curves:
    """Read the figures of one rank: the one that parts, or the first."""
    ranks, others = ranks_of(reference), ranks_of(other)
    rank = result.rank if result.rank is not None else min(ranks.keys() & others.keys())
    readers, found = (Reader(ranks[rank]), Reader(others[rank])), _Curves()
    for number in sorted(set(readers[0].steps) & set(readers[1].steps))[:_MOST_STEPS]:
        steps = [reader.step(number) for reader in readers]
        for side, step in enumerate(steps):
            gradients = [seen for seen in step.seen if seen.event.kind == "reduced"]
            squares = [seen.values.double().square().mean().item() * math.prod(seen.shape) for seen in gradients]
            if squares:
                found.norms[side][number] = math.sqrt(sum(squares))
            losses = [seen.values.double() for seen in step.seen if seen.event.kind == "loss"]
            if losses:
                found.losses[side][number] = torch.cat(losses).mean().item()
        theirs = {seen.event: seen for seen in steps[1].seen}
        for seen in steps[0].seen:
            if seen.event in theirs and unit_of(seen):
                ratio = min(distance(seen.values, theirs[seen.event].values).ratio(unit_of(seen)), 1e16)
                of_phase = found.phases.setdefault(PHASE_OF[seen.event.kind], {})
                of_phase[number] = max(of_phase.get(number, 0.0), ratio)
                if number == (result.step or readers[0].steps[-1]):
                    found.modules[seen.event.module] = max(found.modules.get(seen.event.module, 0.0), ratio)
    return found


def _table(result: Result) -> str:
    if result.agrees:
        return ""
    rows = {name: getattr(result, name) for name in ("step", "rank", "phase", "module", "item", "operator")}
    rows["size, in units of rounding"] = f"{result.ratio:.3g}"
    rows["begins here"] = "yes" if result.is_cause else "not known"
    rows["next"] = result.next
    return "<h2>The first difference</h2>" + _rows({key: value for key, value in rows.items() if value is not None})


def _rows(rows: Mapping[str, object]) -> str:
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(lines)}</table>"


def _settings(result: Result) -> str:
    if not result.settings:
        return ""
    texts = {each.name: f"{each.recorded} → {each.replayed}" for each in result.settings}
    return "<h2>Settings that differ</h2>" + _rows(texts)


def _plot(title: str, curves: Mapping[str, Mapping[int, float]], *, logarithmic: bool = False) -> str:
    """Return a plot of curves by step."""

    def scaled(value: float) -> float:
        return math.log10(max(value, 1e-3)) if logarithmic else value

    shown = {
        name: [(step, scaled(value)) for step, value in curve.items() if math.isfinite(value)]
        for name, curve in curves.items()
    }
    points = [point for curve in shown.values() for point in curve]
    if not points:
        return ""
    left, right = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)

    def place(step: int, value: float) -> str:
        x = _EDGE + (step - left) / max(1, right - left) * (_WIDTH - 2 * _EDGE)
        y = _HEIGHT - _EDGE / 2 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - _EDGE)
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for number, (name, curve) in enumerate(shown.items()):
        color, style = _COLORS[number], ' stroke-dasharray="6 3"' if number else ""
        line = " ".join(place(*point) for point in curve)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"{style}/>')
        drawn += [f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>' for x, y in (place(*p).split(",") for p in curve)]
        drawn.append(f'<text x="{_EDGE + 90 * number}" y="14" fill="{color}">{escape(name)}</text>')
    power = "10^" if logarithmic else ""
    drawn += [
        f'<text x="2" y="{_HEIGHT - _EDGE / 2:.0f}">{power}{low:.3g}</text>',
        f'<text x="2" y="{_EDGE / 2 + 8:.0f}">{power}{high:.3g}</text>',
        f'<text x="{_EDGE}" y="{_HEIGHT - 4}">step {left}</text>',
        f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 4}" text-anchor="end">step {right}</text>',
    ]
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" font-size="12">{"".join(drawn)}</svg>'
    return f"<h2>{escape(title.capitalize())}</h2>{svg}"


def _tree(modules: Mapping[str, float], result: Result) -> str:
    """Return the modules of the step that parts, each with a colour for its difference."""
    if not modules:
        return ""
    lines = []
    for name, ratio in modules.items():
        share = 0.0 if ratio <= 0 else min(1.0, max(0.0, math.log10(max(ratio, 1.0)) / 7 + 0.1))
        first = " ← first" if not result.agrees and name == result.module else ""
        depth = name.count(".") + bool(name)
        lines.append(
            f'<div style="margin-left:{depth * 1.5}em;background:rgba(214,39,40,{share:.2f})">'
            f"{escape(name or '(the model itself)')}: {ratio:.3g}{first}</div>"
        )
    step = f"step {result.step}" if result.step else "the last step"
    return f'<h2>Modules in {step}, in units of rounding</h2><div class="tree">{"".join(lines)}</div>'
