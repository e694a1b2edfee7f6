"""`accelcore doctor`: ask plugins in separate processes, diagnose, and print JSON or lines.

It only reports: `devices` chooses, and `known_faults.py` and `torch_features.py` have the tables.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from accelcore.cli.options import common, json_option, number
from accelcore.devices.plugins import how_to_fit, how_to_install
from accelcore.known_faults import CANNOT_AVOID
from accelcore.util.text import shown

if TYPE_CHECKING:
    from accelcore.cli.doctor.ask_plugins import Selection
    from accelcore.cli.doctor.deep import Attempt
    from accelcore.cli.doctor.diagnosis import Diagnosis, Plugin

_GOOD, _MEDIUM, _BAD, _HEAD = "green", "yellow", "bold red", "bold underline"
_STYLES = {"usable": _GOOD, "loads": _GOOD, "works": _GOOD, "unusable": _MEDIUM, "not tried": _MEDIUM}

_Line = tuple[int, str, str]  # a line: its indentation, its text, and the name of a rich style or an empty string


@click.command()
@json_option
@click.option("--deep", is_flag=True, help="Also import torch and try each usable backend, in processes of their own.")
@number("--timeout", "SECONDS", 60, "How long one attempt may take.", most=86400)
@common
def doctor(as_json: bool, deep: bool, timeout: int) -> int:
    """Report which backends work here, and what the others lack.

    Asks plugins and reads package metadata, and touches no device. A child process tries `import torch`. Later calls
    skip this if it worked and has not changed, unless `import torch` also loads other packages. With --deep, child
    processes multiply two small matrices on every usable backend, so that a crash or a hang is reported.

    \b
    Exit code:
      0   every plugin answered, and at least one backend is usable
      1   something is broken: torch, a plugin, an attempt of --deep, versions; or select() raises
      2   no backend is usable, and import torch works
      64  the request is invalid

    \b
    Examples:
      accelcore doctor
      accelcore doctor --deep --timeout 120
      accelcore doctor --json | python -m json.tool
    """
    from accelcore.cli.doctor.diagnosis import diagnose

    found = diagnose(timeout, deep=deep)
    _show(found, as_json=as_json)
    return found.exit_code


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    """Print a diagnosis to stdout; rich is imported only for a terminal."""
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.as_json(), indent=2) + "\n")
        return
    # Characters of a plugin's text that would move the cursor or break a line are escaped.
    lines = (
        (indent, "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), style)
        for indent, text, style in _lines(diagnosis)
    )
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        console = Console(highlight=False)
        for indent, text, style in lines:
            console.print(Padding(Text(text, style), (0, 0, 0, indent)))
    else:
        encoding = sys.stdout.encoding or "utf-8"
        for indent, text, _ in lines:
            line = " " * indent + text.rstrip() + "\n"
            sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))


def _lines(diagnosis: Diagnosis) -> Iterator[_Line]:
    """Yield the lines of a diagnosis, without details such as distributions that are not installed."""
    yield 0, ", ".join(f"{name} {version or 'not installed'}" for name, version in diagnosis.versions.items()), "bold"
    yield 0, f"{diagnosis.platform}, {diagnosis.executable}", ""
    yield 0, "", ""
    yield from _attempt("import torch", diagnosis.import_torch)
    yield from _misfits(diagnosis.misfits)
    yield from _headed("backends")
    if not diagnosis.backends:
        yield 2, f"none is installed: {how_to_install('accelcore-cpu')}", _BAD
    width = max((len(backend.name) for backend in diagnosis.backends), default=0)
    for backend in diagnosis.backends:
        yield from _plugin(backend, width)
    if diagnosis.extensions:
        yield from _headed("extensions")
        for extension in diagnosis.extensions:
            yield from _plugin(extension)
    if diagnosis.deep is not None:
        yield from _headed("deep: each in a child process")
        for attempt in diagnosis.deep:
            yield from _attempt(f"backend {attempt.name}", attempt)
    if diagnosis.import_torch.notes:
        yield from _headed("torch")
        for note in diagnosis.import_torch.notes:
            for line in note.splitlines():
                yield 2, line, _MEDIUM
    values = {name: value for name, value in diagnosis.environment.items() if value is not None}
    if values or diagnosis.unknown_variables:
        yield from _headed("environment")
    for name, value in values.items():
        yield 2, f"{name}={shown(value, 200)}", ""
    for name, near in diagnosis.unknown_variables.items():
        meant = f": did you mean {near}?" if near else ""
        yield 2, f"{name} is set, and nothing installed reads it{meant}", _MEDIUM
    if diagnosis.autoload:
        yield from _headed("import torch calls")
        for autoload in diagnosis.autoload:
            yield 2, str(autoload), ""
    if diagnosis.faults:
        left = sum(str(fault["instead"]).startswith(CANNOT_AVOID) for fault in diagnosis.faults)
        found = f"{len(diagnosis.faults)}; {len(diagnosis.faults) - left} are avoided"
        yield 0, "", ""
        yield 0, f"known kernel bugs: {found}, {left} others affect rare calls (--json: all)", ""
    yield from _headed("select()")
    yield from _selection(diagnosis.selection)
    yield 0, "", ""
    verdict = [f"usable: {', '.join(diagnosis.usable)}" if diagnosis.usable else "no backend is usable"]
    verdict += [f"broken: {', '.join(diagnosis.broken)}"] if diagnosis.broken else []
    yield 0, "; ".join(verdict), _BAD if diagnosis.exit_code else _GOOD


def _headed(title: str) -> Iterator[_Line]:
    yield 0, "", ""
    yield 0, title, _HEAD


def _plugin(plugin: Plugin, width: int = 0) -> Iterator[_Line]:
    state = "not usable" if plugin.state == "unusable" else plugin.state
    count = f"{plugin.count} device{'s' * (plugin.count != 1)}, " if plugin.state == "usable" else ""
    yield 2, f"{plugin.name:{width}}  {state}  {count}{plugin.distribution}", _STYLES.get(plugin.state, _BAD)
    yield from _explained(plugin.reason, plugin.remedy)
    runtimes = ", ".join(f"{name} {version}" for name, version in plugin.versions.items() if version is not None)
    if runtimes:
        yield 6, f"runtime: {runtimes}", ""
    yield from _misfits(plugin.misfits)


def _selection(selection: Selection) -> Iterator[_Line]:
    asked = "ACCEL_DEVICE is not set, which means auto"
    if selection["source"] == "ACCEL_DEVICE":
        asked = f"ACCEL_DEVICE={shown(selection['request'])}"
    error = selection["error"]
    if error is not None:
        yield 2, f"would raise {error['type']}  {asked}" if error["type"] else f"would not return  {asked}", _BAD
        yield 6, error["what"], ""
        yield from _explained(error["why"], error["remedy"])
        return
    yield 2, f"would choose {selection['chosen']}  {asked}: {selection['why']}", _GOOD
    for passed in selection["passed_over"]:
        yield 6, f"{passed['name']} does not work: {passed['reason']}", ""


def _attempt(label: str, attempt: Attempt) -> Iterator[_Line]:
    seconds = "" if attempt.outcome == "not tried" else f"  {attempt.seconds:.1f} s"
    yield 2, f"{label}  {attempt.outcome}{seconds}", _STYLES.get(attempt.outcome, _BAD)
    yield from _explained(attempt.reason, attempt.remedy)
    if attempt.name != "torch":  # a heading of its own has torch's
        yield from ((6, note, "") for note in attempt.notes)


def _explained(reason: str, remedy: str) -> Iterator[_Line]:
    for label, text in (("why", reason), ("what to do", remedy)):
        if text:
            yield 6, f"{label}: {text}", ""


def _misfits(misfits: tuple[str, ...]) -> Iterator[_Line]:
    for misfit in misfits:
        yield 6, f"does not fit: {misfit}", _BAD
    yield from _explained("", how_to_fit() if misfits else "")
