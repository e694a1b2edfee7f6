"""Findings for people: the place, the line with a mark under it, why, and what to write."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from accelcore_lint.files import shown
from accelcore_lint.finding import Finding
from accelcore_lint.rules import RULES

_WIDEST = 160  # characters of a line that are shown


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print findings. Nothing in them is read as markup."""
    for finding in findings:
        for line in _lines(finding):
            console.print(line, soft_wrap=True)


def _lines(finding: Finding) -> list[Text]:
    rule = RULES.get(finding.code)
    name = f" {rule.name}" if rule else ""
    head = Text.assemble((shown(finding.place), "bold"), " ", (finding.code, "bold red"), (name, "red"))
    lines = [head, *_excerpt(finding)]
    for label, text in (("why", finding.why), ("write", finding.write)):
        lines.append(Text.assemble("  ", (f"{label}: ", "bold"), shown(text)))
    if rule:
        lines.append(Text.assemble("  ", ("see: ", "bold"), rule.anchor))
    return [*lines, Text()]


def _excerpt(finding: Finding) -> list[Text]:
    """Return the line and the mark below it; long lines are cut around the mark."""
    before = finding.text[: finding.column - 1].lstrip()
    last = finding.end_column - 1 if finding.end_line == finding.line else len(finding.text)
    marked = finding.text[finding.column - 1 : last].rstrip() or " "
    if len(before) > _WIDEST // 2:
        before = "..." + before[-_WIDEST // 2 :]
    line = (before + marked + finding.text[finding.column - 1 + len(marked) :]).rstrip()[:_WIDEST]
    width = max(1, min(len(marked), _WIDEST - len(before)))
    # A tab before the mark stays one, so that the mark is below its code.
    indent = "".join("\t" if character == "\t" else " " for character in before)
    return [
        Text.assemble(("  | ", "blue"), shown(line.replace("\t", "    "))),
        Text.assemble(("  | ", "blue"), indent.replace("\t", "    "), ("^" * width, "red")),
    ]
