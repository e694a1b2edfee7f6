"""Print a diagnosis: as JSON, as plain lines for a pipe, or as the same lines with colours on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from accelcore.cli.doctor.ask_plugins import SelectionPreview
from accelcore.cli.doctor.deep import Trial
from accelcore.cli.doctor.diagnosis import USABLE, Backend, Diagnosis, Extension, Misfit
from accelcore.devices.plugins import how_to_install
from accelcore.util.text import shown

__all__ = ["show"]

_STYLES = {
    "usable": "green",
    "loads": "green",
    "works": "green",
    "unusable": "yellow",
    "not tried": "yellow",
    "broken": "bold red",
    "failed": "bold red",
    "crashed": "bold red",
    "hung": "bold red",
}
_WORDS = {"unusable": "not usable"}


_Line = tuple[int, list[tuple[str, str]]]
"""A line: its indentation, and pieces of text, each with the name of a rich style or an empty one."""


def show(diagnosis: Diagnosis, *, as_json: bool = False) -> None:
    """Print a diagnosis to stdout; rich is imported only for a terminal."""
    if as_json:
        sys.stdout.write(json.dumps(diagnosis.as_json(), indent=2) + "\n")
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        console = Console(highlight=False)
        for indent, pieces in _lines(diagnosis):
            console.print(Padding(Text.assemble(*pieces), (0, 0, 0, indent)))
    else:
        encoding = sys.stdout.encoding or "utf-8"
        for indent, pieces in _lines(diagnosis):
            line = " " * indent + "".join(text for text, _ in pieces).rstrip() + "\n"
            sys.stdout.write(line.encode(encoding, "backslashreplace").decode(encoding))


def _lines(diagnosis: Diagnosis) -> Iterator[_Line]:
    """Yield the lines of a diagnosis, without details such as distributions that are not installed."""
    versions = (f"{name} {version or 'not installed'}" for name, version in diagnosis.versions.items())
    yield _line(0, (", ".join(versions), "bold"))
    yield _line(0, (f"{diagnosis.platform}, {diagnosis.executable}", "dim"))
    yield from _misfits(diagnosis.misfits)
    yield from _headed("backends")
    if not diagnosis.backends:
        yield _line(2, (f"none is installed: {how_to_install('accelcore-cpu')}", "bold red"))
    width = max((len(_printable(backend.name)) for backend in diagnosis.backends), default=0)
    for backend in diagnosis.backends:
        yield from _backend(backend, width)
    if diagnosis.extensions:
        yield from _headed("extensions")
        for extension in diagnosis.extensions:
            yield from _extension(extension)
    yield from _headed("select()")
    yield from _selection(diagnosis.selection)
    if diagnosis.deep is not None:
        yield from _headed("deep: each in a child process")
        trials = (diagnosis.deep.torch, *diagnosis.deep.backends)
        for label, trial in zip(("import torch", *(f"backend {t.name}" for t in trials[1:])), trials, strict=True):
            yield from _trial(label, trial)
    yield from _headed("environment")
    for name, value in diagnosis.environment.items():
        if value is not None:
            yield _line(2, (f"{name}={shown(value, 200)}", "cyan"))
    unset = ", ".join(name for name, value in diagnosis.environment.items() if value is None)
    yield _line(2, ("not set: ", "dim"), (unset or "none", ""))
    if diagnosis.autoload:
        yield from _headed("import torch calls")
        for autoload in diagnosis.autoload:
            yield _line(2, (str(autoload), ""))
    if diagnosis.faults:
        yield from _headed("known kernel bugs in the installed versions")
        for fault in diagnosis.faults:
            whose = f", {fault.backend}" if fault.backend else ""
            yield _line(2, (fault.kernel, "bold"), (f"  {fault.package} {fault.installed}{whose}", ""))
            yield _line(6, ("what: ", "dim"), (fault.what, ""))
            yield _line(6, ("instead: ", "dim"), (fault.instead, ""))
            yield _line(6, ("see: ", "dim"), (fault.reference, ""))
    if diagnosis.crash:
        yield from _headed("all plugins together")
        yield _line(2, (diagnosis.crash, "bold red"))
    for advice in diagnosis.advice:
        yield _line(0)
        yield _line(0, ("note: ", "bold yellow"), (advice, ""))
    yield _line(0)
    yield _line(0, _verdict(diagnosis))


def _backend(backend: Backend, width: int) -> Iterator[_Line]:
    name, word = _printable(backend.name).ljust(width), _WORDS.get(backend.state, backend.state)
    count = f"{backend.count} device{'s' * (backend.count != 1)}, " if backend.state == "usable" else ""
    yield _line(2, (name, "bold"), ("  ", ""), (word, _STYLES[backend.state]), (f"  {count}{backend.distribution}", ""))
    yield from _explained(backend.reason, backend.remedy)
    runtimes = ", ".join(f"{name} {version}" for name, version in backend.versions.items() if version is not None)
    if runtimes:
        yield _line(6, ("runtime: ", "dim"), (runtimes, ""))
    yield from _misfits(backend.misfits)


def _extension(extension: Extension) -> Iterator[_Line]:
    yield _line(
        2, (extension.name, "bold"), ("  ", ""), (extension.state, _STYLES[extension.state]),
        (f"  {extension.distribution}", ""),
    )  # fmt: skip
    yield from _explained(extension.reason, extension.remedy)
    yield from _misfits(extension.misfits)


def _selection(preview: SelectionPreview) -> Iterator[_Line]:
    asked = "ACCEL_DEVICE is not set, which means auto"
    if preview.source == "ACCEL_DEVICE":
        asked = f"ACCEL_DEVICE={shown(preview.request)}"
    if preview.error is not None:
        error = preview.error
        word = ("would raise ", "") if error.type else ("would not return", "bold red")
        yield _line(2, word, (error.type, "bold red"), (f"  {asked}", ""))
        yield _line(6, (error.what, ""))
        yield from _explained(error.why, error.remedy)
        return
    yield _line(2, ("would choose ", ""), (preview.chosen or "", "bold green"), (f"  {asked}: {preview.why}", ""))
    for passed in preview.passed_over:
        yield _line(6, (f"passed over {passed.name}: ", "dim"), (passed.reason, ""))


def _trial(label: str, trial: Trial) -> Iterator[_Line]:
    seconds = "" if trial.outcome == "not tried" else f"  {trial.seconds:.1f} s"
    yield _line(2, (label, "bold"), ("  ", ""), (trial.outcome, _STYLES[trial.outcome]), (seconds, "dim"))
    yield from _explained(trial.reason, trial.remedy)


def _verdict(diagnosis: Diagnosis) -> tuple[str, str]:
    broken = f"broken: {', '.join(diagnosis.broken)}" if diagnosis.broken else ""
    if not diagnosis.usable:
        return "no backend is usable" + (f"; {broken}" if broken else ""), "bold red"
    usable = f"usable: {', '.join(diagnosis.usable)}"
    return (usable, "bold green") if diagnosis.exit_code == USABLE else (f"{usable}; {broken}", "bold red")


def _explained(reason: str, remedy: str) -> Iterator[_Line]:
    for label, text in (("why: ", reason), ("what to do: ", remedy)):
        if text:
            yield _line(6, (label, "dim"), (text, ""))


def _misfits(misfits: tuple[Misfit, ...]) -> Iterator[_Line]:
    for misfit in misfits:
        yield _line(6, ("does not fit: ", "bold red"), (misfit.reason, ""))
        yield from _explained("", misfit.remedy)


def _headed(title: str) -> Iterator[_Line]:
    yield _line(0)
    yield _line(0, (title, "bold underline"))


def _line(indent: int, *pieces: tuple[str, str]) -> _Line:
    return indent, [(_printable(text), style) for text, style in pieces]


def _printable(text: str) -> str:
    """Escape characters of a plugin's text that would move the cursor or break a line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
