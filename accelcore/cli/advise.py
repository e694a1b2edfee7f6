"""The command `advise`, and its reports: a table, a page and JSON. The script runs in a process of its own."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from accelcore.cli.options import check_script, common, device_option, json_option, number, script_arguments
from accelcore.util.files import plot, table, write_html

if TYPE_CHECKING:
    from rich.console import Console

    from accelcore.advise import Advice, Row

_HEAD = ("", "loss", "difference", "divergence", "overflows", "ms a step", "quartiles", "memory", "")


@click.command(context_settings={"allow_interspersed_args": False})
@number("--steps", "K", 50, "Updates of a trial.", least=10)
@number("--seeds", "N", 3, "How many other seeds measure the noise of the loss.")
@number("--rounds", "N", 2, "How often each variant is tried for its time, in turn with the others.")
@number("--timeout", "SECONDS", 300, "How long the start of a trial, and each of its steps, may take.", most=86400)
@click.option(
    "--preset", "presets", metavar="NAME", multiple=True, help="Try only this preset beside fp32; repeatable."
)
@click.option("--all", "every", is_flag=True, help="Try each preset that agrees compiled, flat and not flat.")
@device_option("--device", "DEVICE", "The device, as in accelcore run.")
@number("--nproc", "N", 1, "How many ranks each trial has, as in accelcore run.")
@device_option("--emulate", "NAME", "Run on an emulation of the backend NAME, as in accelcore run.")
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Also write a page in one file.")
@json_option
@script_arguments
@common
def advise(
    script: str,
    arguments: tuple[str, ...],
    *,
    steps: int,
    seeds: int,
    rounds: int,
    timeout: int,
    presets: tuple[str, ...],
    every: bool,
    device: str | None,
    nproc: int,
    emulate: str | None,
    module: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Recommend the fastest precision that trains as fp32 does.

    The script must use accel.trainer, and is not changed. Each trial runs it for some steps, in a process of its own.
    Trials in fp32 with other seeds show how much the loss varies by chance. Trials save and resume no checkpoint, and
    write no accelcore.Log. Whatever else the script writes, each trial writes.

    Presets: fp32-fast, bf16, fp16, O1, O1-bf16, O2, O2-bf16, O3, O3-bf16. Without --preset, all that the device
    declares are tried. Then the recommended one is tried compiled, flat and not flat; with --all, each one that agrees.

    \b
    Exit code:
      0   a variant is recommended
      1   none is recommended, or the noise of seeds is not known
      64  the request is invalid, or the script cannot be tried

    \b
    Examples:
      accelcore advise train.py
      accelcore advise --steps 200 --html advice.html train.py --epochs 3
      accelcore advise --preset bf16 --rounds 5 train.py
      accelcore advise --json train.py > advice.json
    """
    from accelcore.advise import advise
    from accelcore.advise.trials import Script

    if not module:
        check_script(script)
    command = [*(["--device", device] if device else []), *(["--nproc", str(nproc)] if nproc > 1 else [])]
    command += [*(["--emulate", emulate] if emulate else []), *(["-m"] if module else []), script, *arguments]
    start = perf_counter()

    def show(trial: str, number: int, most: int) -> None:
        seconds = perf_counter() - start
        progress = f"trial {number}"
        if most:
            left = seconds / (number - 1) * (most - number + 1)
            progress += f" of at most {most}, after {seconds:.0f} s, about {left:.0f} s left"
            if number == 2:
                progress += " (less with --preset, --seeds 1, --rounds 1 or fewer --steps)"
        click.echo(f"{progress}: {trial}", err=True)

    advice = advise(
        Script(command, steps, timeout), presets=presets, every=every, seeds=seeds, rounds=rounds, show=show
    )
    if as_json:
        click.echo(json.dumps(report_of(advice), indent=2))
    else:
        from rich.console import Console

        # Not on a terminal, the table is as wide as it is: a file has no edge.
        print_table(advice, Console(width=None if sys.stdout.isatty() else 200))
    if html is not None:  # last: an error here loses nothing
        write_page(advice, html)
    return advice.exit_code


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


def report_of(advice: Advice) -> dict[str, Any]:
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
