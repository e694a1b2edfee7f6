"""The commands `record` and `replay`, and the page of a replay.

The script runs in a process of its own, started as `accelcore run` starts it.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from accelcore.checkpoint.folders import as_path
from accelcore.cli.options import (
    check_script,
    common,
    device_option,
    json_option,
    nproc_option,
    number,
    script_arguments,
)
from accelcore.devices.plugins import without_autoload
from accelcore.errors import ConfigurationError, RecordingError
from accelcore.util import child_process
from accelcore.util.files import beside, plot, table, write_html

if TYPE_CHECKING:
    from accelcore.parity.compare import Result
    from accelcore.parity.events import SeenStep

_RUNNER = Path(__file__).with_name("recorded_script.py")  # not imported: it imports torch
_AFTER_THE_SCRIPT = {"allow_interspersed_args": False}
_NOTHING, _INVALID = 2, 64
_MOST_STEPS = 500  # of a page

_device = device_option("--device", "DEVICE", "What select() chooses in the script, as ACCEL_DEVICE does.")
_emulate = device_option("--emulate", "NAME", "Run on an emulation of the backend NAME, on this host.")
_nproc = nproc_option()
_steps = number("--steps", "N", 0, "End the script after so many steps; 0 for all.", least=0)


@click.command(context_settings=_AFTER_THE_SCRIPT)
@click.option("--out", metavar="FOLDER", required=True, type=click.Path(), help="Where the recording goes.")
@click.option("--operators", metavar="STEPS", default="", help="Steps whose operators are recorded, too: 1 or 1,5.")
@click.option("--batches", is_flag=True, help="Also keep whole batches, for replay --take-batches.")
@click.option("--same-random", is_flag=True, help="Draw random numbers on the host, the same for every device.")
@_steps
@_device
@_emulate
@_nproc
@script_arguments
@common
def record(
    out: str, operators: str, script: str, arguments: tuple[str, ...], *, batches: bool, same_random: bool, steps: int,
    **places: Any,
) -> int:  # fmt: skip
    """Record a training run, to compare other runs with it.

    The script is unchanged, with a trainer of accelcore or a loop of its own. Options of accelcore go before SCRIPT,
    the script's own after it. Recording changes no bit of the run, but --same-random changes its random numbers.

    \b
    Exit code: that of the script; 64 if the request is invalid.

    \b
    Examples:
      accelcore record --out ref train.py --epochs 1
      accelcore record --out ref --steps 20 --same-random train.py
      accelcore record --out ref -m mypackage.train
    """
    options = {
        "operators": _numbers(operators),
        "batches": batches,
        "random": "everywhere" if same_random else None,
        "steps": steps or None,
    }
    if Path(out).exists():
        raise ConfigurationError(
            f"--out {out} exists", why="it may be a recording", remedy="name a folder that does not exist, or delete it"
        )
    return _run("record", out, options, places, script, arguments)


@click.command(context_settings=_AFTER_THE_SCRIPT)
@click.option("--self", "itself", is_flag=True, help="Record and replay here: is this device deterministic?")
@click.option("--out", metavar="FOLDER", type=click.Path(), help="Where the replay is recorded; REF-replay by default.")
@click.option("--report", metavar="FILE", type=click.Path(), help="Also write a page: one HTML file with plots.")
@click.option("--take-weights", is_flag=True, help="Accept that the script begins with other weights.")
@click.option("--take-batches", is_flag=True, help="Give the model the recorded batches: see record --batches.")
@number("--batch", "N", 0, "Only compare the first batch whole with N of its rows at a time; 0 to replay.", least=0)
@_steps
@_device
@_emulate
@_nproc
@json_option
@click.argument("reference", type=click.Path())
@script_arguments
@common
def replay(
    reference: str, script: str, arguments: tuple[str, ...], *, itself: bool, out: str | None, report: str | None,
    take_weights: bool, take_batches: bool, batch: int, steps: int, as_json: bool, **places: Any,
) -> int:  # fmt: skip
    """Run a recorded script again, and name the first difference.

    Options of accelcore go before REFERENCE, the script's own after SCRIPT.

    REFERENCE is a recording; with --self it is a new folder, which is recorded first. The replay begins with the
    recorded weights and random numbers, and ends after the last recorded step. It saves no checkpoint, and resumes only
    where the recorded run resumed. If the runs differ in a forward or backward pass, that step is run again: each of
    its operators is compared with a float64 result of the host for the same inputs.

    \b
    Exit code:
      0   the runs agree
      1   the runs differ, or they have different settings, such as the learning rate
      2   nothing could be compared: the script failed, or made no step
      64  the request is invalid, or the recording is damaged

    \b
    Examples:
      accelcore replay ref train.py --epochs 1
      accelcore replay --emulate npu --device npu --report ref.html ref train.py
      accelcore replay --take-batches ref train.py
      accelcore replay --batch 1 ref train.py
      accelcore replay --self new train.py
      accelcore replay -m ref mypackage.train
    """
    folder = Path(out) if out else beside(Path(reference), "-replay")
    if batch and report:
        raise ConfigurationError("--batch cannot write a page", remedy="remove --report; --json prints the result")
    # No checkpoint is saved, so that each run begins where the one before began.
    recorded: dict[str, Any] = {"steps": steps or None, "batches": take_batches, "saves": False}
    if itself:
        if Path(reference).exists():
            raise ConfigurationError(
                f"{reference} exists, and --self would replace it by a recording of this device",
                remedy="name a folder that does not exist",
            )
        if code := _run("record", reference, recorded, places, script, arguments):
            return _failed(code)
    options: dict[str, Any] = {
        "steps": steps or None,
        "out": str(folder),
        "weights": "take" if take_weights else "compare",
        "batches": "take" if take_batches else "compare",
        "batch": batch or None,
    }
    if code := _run("replay", reference, options, places, script, arguments):
        return _failed(code)
    with without_autoload():  # packages of devices may work only as `--emulate` sets them up
        from accelcore.parity.compare import compare

    found = compare(reference, folder)
    if found.phase in ("forward", "backward") and found.operator is None:
        click.echo(f"accelcore: step {found.step} runs again, operator by operator", err=True)
        closer = {"operators": [found.step], "steps": found.step}
        if itself:
            _run("record", reference, {**recorded, **closer}, places, script, arguments)
        if _run("replay", reference, {**options, **closer}, places, script, arguments) == 0:
            closest = compare(reference, folder)
            found = found if closest.agrees else closest
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
    if report:
        write_page(Path(report), found, Path(reference), folder)
    return 0 if found.agrees else 1


def _failed(code: int) -> int:
    """Report that the script failed, unless the request was at fault, and return the command's exit code."""
    if code == _INVALID:  # reported by `accelcore run`, or by the program that reads the recording
        return _INVALID
    click.echo(f"accelcore: nothing was compared: the script ended with exit code {code}", err=True)
    return _NOTHING


def _run(
    mode: str, folder: str, options: dict[str, Any], places: dict[str, Any], script: str, arguments: Sequence[str]
) -> int:
    """Run a script in a process of its own, and return its exit code; 128 and the signal that ended it."""
    places = {**places, "nproc": places["nproc"] or "auto"}
    module = ["-m"] if places.pop("module") else []
    if not module:
        check_script(script)
    if mode == "replay" and not as_path(folder).is_dir():  # the script's process reports it after it has imported torch
        remedy = f"make it: accelcore record --out {folder} {script}"
        raise RecordingError(f"there is no recording in {folder}", remedy=remedy)
    child_process.raise_on_signals()  # so that the script ends with this process
    given = [word for name, value in places.items() if value is not None for word in (f"--{name}", str(value))]
    program = [str(_RUNNER), mode, folder, json.dumps(options), *module, script, *arguments]
    try:
        code = subprocess.run(child_process.command("accelcore.cli", "run", *given, *program), check=False).returncode  # noqa: S603  # this Python
    except KeyboardInterrupt:  # reported by the process of the script
        sys.exit(128 + signal.SIGINT)
    return code if code >= 0 else 128 - code


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError as error:
        raise ConfigurationError(
            f"--operators {text!r} is not a list of steps", remedy="give numbers, such as 1,5"
        ) from error


def _show(found: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if found.settings:
        table = Table("setting", "recorded", "replayed", title="settings that differ", title_justify="left")
        for each in found.settings:
            table.add_row(each.name, each.recorded, each.replayed)
        console.print(table)
    if not found.agrees:
        table = Table(title="the first difference", title_justify="left", show_header=False)
        for row in found.rows:
            table.add_row(*row)
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)
    console.print(str(found), highlight=False)


def write_page(path: Path, result: Result, reference: Path, other: Path) -> None:
    """Write the page of a comparison of two recordings: of the rank that diverges, or the first."""
    from accelcore.layerwise import distance, unit_of
    from accelcore.parity.events import PHASE_OF
    from accelcore.parity.recording import Reader, ranks_of

    ranks, others = ranks_of(reference), ranks_of(other)
    rank = result.rank if result.rank is not None else min(others)
    readers = [Reader(ranks.get(rank, ranks[min(ranks)])), Reader(others[rank])]
    losses, norms, phases = (defaultdict[str, dict[int, float]](dict) for _ in range(3))
    modules: dict[str, float] = {}
    for step_number in sorted(set(readers[0].steps) & set(readers[1].steps))[:_MOST_STEPS]:
        steps = [reader.step(step_number) for reader in readers]
        for side, step in zip(("recorded", "replayed"), steps, strict=True):
            norms[side][step_number], losses[side][step_number] = _norm(step), _loss(step)
        theirs = {seen.event: seen for seen in steps[1].seen}
        for seen in steps[0].seen:
            if (unit := unit_of(seen.values.dtype)) and seen.event in theirs:
                ratio = min(distance(seen.values, theirs[seen.event].values).ratio(unit), 1e16)
                of_phase = phases[PHASE_OF[seen.event.kind]]
                of_phase[step_number] = max(of_phase.get(step_number, 0.0), ratio)
                if step_number == (result.step or readers[0].steps[-1]):
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
    losses = [loss for seen in step.seen if seen.event.kind == "loss" for loss in seen.values.double().tolist()]
    return fmean(losses) if losses else math.nan


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
