"""Reports of `accelcore advise`: a table for the terminal, a page in one file, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcore.advise.advise import Advice, Row
from accelcore.util.html import plot, table
from accelcore.util.html import write_page as write_html

if TYPE_CHECKING:
    from rich.console import Console

_HEAD = ("", "loss", "difference", "divergence", "overflows", "ms a step", "quartiles", "memory", "")


def print_table(advice: Advice, console: Console) -> None:
    """Print the variants side by side, and the recommendation with its reason."""
    from rich.table import Table

    table = Table(*_HEAD, box=None, header_style="bold")
    for column in table.columns[1:-1]:
        column.justify, column.no_wrap = "right", True
    for row in advice.rows:
        best = row.variant.name == advice.recommended
        table.add_row(*_cells(row, advice), style="bold green" if best else "" if row.agrees else "dim")
    console.print(table)
    for line in _sentences(advice):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the advice for JSON. What is not known is null."""
    return {
        "schema": 1,
        "script": list(advice.script.command),
        "steps": advice.script.steps,
        "model": advice.about["name"],
        "device": advice.about["device"],
        "emulated": advice.about["emulated"],
        "torch": advice.about["torch"],
        "overridden": advice.about["overridden"],
        "noise": _number(advice.noise),
        "seed_losses": [_number(loss) for loss in advice.seeds],
        "seed_divergence": _number(advice.seed_divergence),
        "recommended": advice.recommended or None,
        "reason": advice.reason,
        "notes": advice.notes,
        "exit_code": advice.exit_code,
        "variants": [
            {
                "name": row.variant.name,
                "options": dict(row.variant.options),
                "agrees": row.agrees,
                "why": row.why,
                "loss": _number(row.loss),
                "difference": _number(row.difference),
                "divergence": _number(row.divergence),
                "overflows": row.overflows,
                "seconds": [_number(value) for value in row.seconds],
                "memory": row.memory or None,
                "losses": row.outcomes[0].losses if row.outcomes else [],
            }
            for row in advice.rows
        ],
    }


def write_page(advice: Advice, path: Path) -> None:
    """Write a page that loads nothing from elsewhere: the table, and the losses as curves."""
    curves = {
        row.variant.name: {step: loss for step, loss in enumerate(row.outcomes[0].losses, 1) if loss is not None}
        for row in advice.rows
        if row.outcomes
    }
    rows = table((_cells(row, advice) for row in advice.rows), head=_HEAD, best=advice.recommended)
    paragraphs = [f"<p>{escape(line)}</p>" for line in _sentences(advice)]
    write_html(path, f"accelcore advise: {' '.join(advice.script.command)}", [*paragraphs, rows, plot("loss", curves)])


def _cells(row: Row, advice: Advice) -> tuple[str, ...]:
    lower, middle, upper = (each * 1e3 for each in row.seconds)
    verdict = "recommended" if row.variant.name == advice.recommended else "agrees" if row.agrees else row.why
    return (
        row.variant.name,
        _shown(row.loss, ".5g"),
        _shown(row.difference, "+.1e"),
        _shown(row.divergence, ".1e"),
        str(row.overflows) if row.outcomes else "",
        _shown(middle, ".3g"),
        f"{lower:.3g} to {upper:.3g}" if math.isfinite(lower) else "",
        f"{row.memory / 2**20:,.0f} MiB" if row.memory else "",
        verdict,
    )


def _sentences(advice: Advice) -> Iterator[str]:
    about = advice.about
    if about["emulated"]:
        yield f"EMULATED: {about['device']} is imitated on the host; its speed and numerics prove nothing."
    yield (
        f"{about['name']} on {about['device']}, {advice.script.steps} steps a trial. Seeds: the loss in fp32 varies by "
        f"{_shown(advice.noise, '.1e') or 'an unknown amount'}, each step by "
        f"{_shown(advice.seed_divergence, '.1e') or 'an unknown amount'} on average."
    )
    if about["overridden"]:
        yield f"Overridden in each trial: {', '.join(about['overridden'])} of the script."
    for note in advice.notes:
        yield f"Note: {note}."
    if advice.recommended:
        yield f"Recommended: {advice.recommended}. {advice.reason[0].upper()}{advice.reason[1:]}."
    else:
        yield f"No recommendation: {advice.reason}."


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""
