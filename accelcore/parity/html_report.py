"""The result of a replay as one HTML file with plots, which loads nothing from elsewhere."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path

import torch

from accelcore.layerwise import distance, unit_of
from accelcore.parity.compare import Result
from accelcore.parity.events import PHASE_OF, SeenStep
from accelcore.parity.recording import Reader, ranks_of
from accelcore.util.files import plot, table, write_html

_MOST_STEPS = 500


def write_page(path: Path, result: Result, reference: Path, other: Path) -> None:
    """Write the page of a comparison of two recordings: of the rank that diverges, or the first."""
    ranks, others = ranks_of(reference), ranks_of(other)
    rank = result.rank if result.rank is not None else min(others)
    readers = [Reader(ranks.get(rank, ranks[min(ranks)])), Reader(others[rank])]
    losses, norms, phases = (defaultdict[str, dict[int, float]](dict) for _ in range(3))
    modules: dict[str, float] = {}
    for number in sorted(set(readers[0].steps) & set(readers[1].steps))[:_MOST_STEPS]:
        steps = [reader.step(number) for reader in readers]
        for side, step in zip(("recorded", "replayed"), steps, strict=True):
            norms[side][number], losses[side][number] = _norm(step), _loss(step)
        theirs = {seen.event: seen for seen in steps[1].seen}
        for seen in steps[0].seen:
            if (unit := unit_of(seen.values.dtype)) and seen.event in theirs:
                ratio = min(distance(seen.values, theirs[seen.event].values).ratio(unit), 1e16)
                of_phase = phases[PHASE_OF[seen.event.kind]]
                of_phase[number] = max(of_phase.get(number, 0.0), ratio)
                if number == (result.step or readers[0].steps[-1]):
                    modules[seen.event.module] = max(modules.get(seen.event.module, 0.0), ratio)
    plots = [plot("loss", losses), plot("norm of all gradients", norms)] + [
        plot(f"largest difference, {phase}, in units of rounding", {"difference": values}, logarithmic=True)
        for phase, values in phases.items()
        if any(values.values())
    ]
    first = "" if result.agrees else "<h2>The first difference</h2>" + table(result.rows)
    rows = [(each.name, f"{each.recorded} → {each.replayed}") for each in result.settings]
    settings = "<h2>Settings that differ</h2>" + table(rows) if rows else ""
    parts = [f"<p>{escape(str(result))}</p>", first, settings, *plots, _tree(modules, result)]
    write_html(path, "Record and replay", parts)


def _norm(step: SeenStep) -> float:
    """Estimate the norm of all gradients from their samples."""
    gradients = [seen for seen in step.seen if seen.event.kind == "reduced"]
    return math.sqrt(sum(seen.values.double().square().mean().item() * math.prod(seen.shape) for seen in gradients))


def _loss(step: SeenStep) -> float:
    """Return the mean loss of the step; NaN if no loss was seen."""
    return torch.cat([torch.zeros(0), *(seen.values for seen in step.seen if seen.event.kind == "loss")]).mean().item()


def _tree(modules: Mapping[str, float], result: Result) -> str:
    """Return the modules of the step that diverges, each with a colour for its difference."""
    lines = []
    for name, ratio in modules.items():
        share = 0.0 if ratio <= 0 else min(1.0, math.log10(max(ratio, 1.0)) / 7 + 0.1)
        first = " ← first" if not result.agrees and name == result.module else ""
        depth = name.count(".") + bool(name)
        lines.append(
            f'<div style="margin-left:{depth * 1.5}em;background:rgba(214,39,40,{share:.2f})">'
            f"{escape(name or '(the model itself)')}: {ratio:.3g}{first}</div>"
        )
    step = f"step {result.step}" if result.step else "the last step"
    return f'<h2>Modules in {step}, in units of rounding</h2><div class="tree">{"".join(lines)}</div>' if lines else ""
