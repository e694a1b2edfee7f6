"""Report of a port: the diff, a summary for people, and the same as JSON."""

from __future__ import annotations

import difflib
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from accelcore_lint.port.files import Script
from accelcore_lint.port.rewrite import Outcome
from accelcore_lint.port.rule import Level


@dataclass(frozen=True)
class Ported:
    """One file of a run.

    Attributes:
        path: of the script.
        script: the file as it was read.
        outcome: what became of it; None if it could not be ported.
        error: why it could not.
        kept: number of lines that work on one vendor's devices only, in a file that could not be ported.
    """

    path: Path
    script: Script | None = None
    outcome: Outcome | None = None
    error: str = ""
    kept: int = 0

    @property
    def before(self) -> str:
        """Return the source of the script."""
        return self.script.source if self.script else ""


def diff(ported: Ported) -> str:
    """Return the changes as a unified diff, which `patch -p1` and `git apply` take."""
    if ported.outcome is None or ported.outcome.source == ported.before:
        return ""
    lines = difflib.unified_diff(
        list(io.StringIO(ported.before, newline="")),
        list(io.StringIO(ported.outcome.source, newline="")),
        f"a/{ported.path}",
        f"b/{ported.path}",
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def as_json(files: Sequence[Ported], level: Level, mac: str) -> dict[str, Any]:
    """Return the report as plain values: counts of lines for one vendor, rewrites by rule, and what is left."""
    return {
        "level": level.value,
        "vendor_lines": dict(zip(("before", "after"), _lines(files), strict=True)),
        "mac": mac if _changes(files) else "",
        "files": [
            {"path": str(ported.path), "error": ported.error or None}
            | (_kept(ported) if ported.outcome is None else _values(ported, ported.outcome))
            for ported in files
        ],
    }


def _kept(ported: Ported) -> dict[str, Any]:
    return {"vendor_lines": {"before": ported.kept, "after": ported.kept}}


def _values(ported: Ported, outcome: Outcome) -> dict[str, Any]:
    return {
        "changed": outcome.source != ported.before,
        "vendor_lines": {"before": outcome.before, "after": outcome.after},
        "rewrites": dict(Counter(note.rule for note in outcome.rewritten)),
        "left": [asdict(note) for note in outcome.left],
        "harmless": [asdict(note) for note in outcome.harmless],
        "loops": [asdict(note) for note in outcome.loops],
    }


def show(files: Sequence[Ported], level: Level, console: Console, mac: str, *, written: bool) -> None:
    """Print the summary: for each file the lines for one vendor, the rewrites by rule, and what is left and why.

    `mac`: the line on what the files use and MPS lacks.
    """
    done = "rewritten" if written else "would be rewritten"
    for ported in files:
        outcome = ported.outcome
        if outcome is None:
            console.print(Text(f"{ported.path}: {ported.error}", "red"))
            continue
        if not (outcome.rewritten or outcome.left or outcome.harmless or outcome.loops):
            continue
        counts = f" vendor lines {outcome.before} -> {outcome.after}" if outcome.before or outcome.rewritten else ""
        console.print(Text(str(ported.path), "bold") + counts, highlight=False)
        rules = Counter(note.rule for note in outcome.rewritten)
        if rules:
            console.print(Text(f"  {done}: " + ", ".join(f"{rule} {count}" for rule, count in rules.most_common())))
        for title, style, notes in (
            ("left", "yellow", outcome.left),
            ("harmless", "dim", outcome.harmless),
            ("loop", "cyan", outcome.loops),
        ):
            for note in notes:
                by_hand = note.rule == "engine"
                place = f"  {'by hand' if by_hand else title} {ported.path}:{note.line}"
                console.print(Text(f"{place}: {note.text} [{note.rule}]", "yellow" if by_hand else style))
    if mac and _changes(files):
        console.print(Text(mac, "yellow"))
    before, after = _lines(files)
    errors = sum(ported.outcome is None for ported in files)
    left = sum(len(ported.outcome.left) for ported in files if ported.outcome)
    ignored = sum(ported.outcome.ignored for ported in files if ported.outcome)
    settings = f", of which {ignored} harmless" if ignored else ""
    kept = sum(ported.kept for ported in files)
    number = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    text = f"level {level.value}: {number}"
    if before or left or _changes(files):
        text += f", vendor lines {before} -> {after}{settings}, {left} left for you"
    elif errors < len(files):
        text += ", nothing had to be changed"
    text += f", {errors} not ported" if errors else ""
    text += f" with {kept} vendor line{'' if kept == 1 else 's'}" if kept else ""
    engines = sum(note.rule == "engine" for ported in files if ported.outcome for note in ported.outcome.harmless)
    if engines:
        number = f"{engines} file{' is' if engines == 1 else 's are'}"
        text += f"; {number} trained by another library, or may be (see `by hand` above)"
    if not written and _changes(files):
        text += "; no file is changed: --write changes them"
    console.print(Text(text))


def _changes(files: Sequence[Ported]) -> bool:
    return any(ported.outcome and ported.outcome.source != ported.before for ported in files)


def _lines(files: Sequence[Ported]) -> tuple[int, int]:
    outcomes = [ported.outcome for ported in files if ported.outcome is not None]
    kept = sum(ported.kept for ported in files)
    return kept + sum(outcome.before for outcome in outcomes), kept + sum(outcome.after for outcome in outcomes)
