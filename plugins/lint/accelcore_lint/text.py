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
    """Print findings, the sentences of a message once. Nothing in them is read as markup."""
    first: dict[tuple[str, ...], str] = {}
    for finding in findings:
        message = (finding.code, finding.why, finding.write)
        for line in _lines(finding, first.get(message, "")):
            console.print(line, soft_wrap=True)
        first.setdefault(message, finding.place)


def _lines(finding: Finding, before: str) -> list[Text]:
    """Return the lines of a finding; `before` is the place of an earlier one with the same message."""
    rule = RULES.get(finding.code)
    name = f" {rule.name}" if rule else ""
    head = Text.assemble((shown(finding.place), "bold"), " ", (finding.code, "bold red"), (name, "red"))
    lines = [head, *_excerpt(finding)]
    if before:
        return [*lines, Text.assemble("  ", ("as: ", "bold"), shown(before)), Text()]
    for label, text in (("why", finding.why), ("instead", finding.write)):
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
