"""The command `advise`. The script runs in a process of its own for each trial."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import click

from accelcore.cli.options import check_script, common, device_option, json_option, number, script_arguments


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
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.advise import report
    from accelcore.advise.advise import advise
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
        click.echo(f"{progress}: {trial}", err=True)

    advice = advise(
        Script(command, steps, timeout), presets=presets, every=every, seeds=seeds, rounds=rounds, show=show
    )
    if as_json:
        click.echo(json.dumps(report.as_json(advice), indent=2))
    else:
        from rich.console import Console

        # Not on a terminal, the table is as wide as it is: a file has no edge.
        report.print_table(advice, Console(width=None if sys.stdout.isatty() else 200))
    if html is not None:  # last: an error here loses nothing
        report.write_page(advice, html)
    return advice.exit_code
