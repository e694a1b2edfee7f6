"""The result of a replay as one HTML file with plots, which loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

from accelcore.parity.events import PHASE_OF
from accelcore.parity.recording import Reader, ranks_of
from accelcore.parity.result import Result
from accelcore.parity.rounding import distance, unit_of
from accelcore.util.html import plot, table
from accelcore.util.html import write_page as write_html

__all__ = ["write_page"]

_MOST_STEPS = 500


@dataclass
class _Curves:
    """Figures to plot, by step: both losses and norms of gradients, and the largest difference in each phase."""

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
    parts = [f"<p>{escape(str(result))}</p>", _first(result), _settings(result)]
    parts.append(plot("loss", dict(zip(("recorded", "replayed"), curves.losses, strict=True))))
    parts.append(plot("norm of all gradients", dict(zip(("recorded", "replayed"), curves.norms, strict=True))))
    parts += [
        plot(f"largest difference, {phase}, in units of rounding", {"difference": values}, logarithmic=True)
        for phase, values in curves.phases.items()
        if any(values.values())
    ]
    write_html(path, "Record and replay", [*parts, _tree(curves.modules, result)])


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
            if seen.event in theirs and unit_of(seen.dtype):
                ratio = min(distance(seen.values, theirs[seen.event].values).ratio(unit_of(seen.dtype)), 1e16)
                of_phase = found.phases.setdefault(PHASE_OF[seen.event.kind], {})
                of_phase[number] = max(of_phase.get(number, 0.0), ratio)
                if number == (result.step or readers[0].steps[-1]):
                    found.modules[seen.event.module] = max(found.modules.get(seen.event.module, 0.0), ratio)
    return found


def _first(result: Result) -> str:
    if result.agrees:
        return ""
    rows = {name: getattr(result, name) for name in ("step", "rank", "phase", "module", "item", "operator")}
    rows["size, in units of rounding"] = f"{result.ratio:.3g}"
    rows["begins here"] = "yes" if result.is_cause else "not known"
    rows["next"] = result.next
    return "<h2>The first difference</h2>" + table(each for each in rows.items() if each[1] is not None)


def _settings(result: Result) -> str:
    if not result.settings:
        return ""
    rows = ((each.name, f"{each.recorded} → {each.replayed}") for each in result.settings)
    return "<h2>Settings that differ</h2>" + table(rows)


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
