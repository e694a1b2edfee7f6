"""Lint one script: run the rules, drop what a more special rule has said, and apply comments that ignore findings."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint import suppressions
from accelcore_lint.finding import Finding
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.rules import RULES, UNKNOWN
from accelcore_lint.script import Script

_WORDS = ("torch", "apex", "accelcore")
"""A file without one of these words has nothing for the rules: they do not look at it."""


def check(text: str, path: str = "-", *, tree: ast.Module | None = None) -> list[Finding]:
    """Return the findings of all rules in a script, in the order of its lines.

    Args:
        text: the script.
        path: its name, for the findings.
        tree: its syntax tree, if it was parsed already.

    Raises:
        SyntaxError: it cannot be parsed.
        RecursionError: it is nested too deeply.
    """
    if tree is None:
        tree = ast.parse(text)
    ignored = suppressions.read(text)
    lines = text.splitlines() or [""]
    findings = [
        Finding(path, 0, line, start + 1, line, end + 1, UNKNOWN, why, write, lines[line - 1])
        for (line, start, end), why, write in ignored.mistakes(RULES)
    ]
    if any(word in text for word in _WORDS):
        for rule, mark in _marks(Script(text, tree)):
            finding = _finding(rule, mark, path, lines)
            if not ignored.covers(finding):
                findings.append(finding)
    return sorted(findings)


def _marks(script: Script) -> Iterator[tuple[Rule, Mark]]:
    """Yield what the rules mark; each place once a rule, and not by a general rule where a special one has spoken."""
    marks = [(rule, mark) for rule in RULES.values() for mark in rule.check(script)]
    special = {part for rule, mark in marks if not rule.general for part in _covered(mark)}
    # A choice between devices speaks of the names in it, too.
    chosen = {part for _, mark in marks if isinstance(mark.node, ast.IfExp) for part in ast.walk(mark.node)}
    seen = set()
    for rule, mark in marks:
        quiet = rule.general and (
            mark.node in special or (mark.node in chosen and not isinstance(mark.node, ast.IfExp))
        )
        if not quiet and (rule.code, mark.node) not in seen:
            seen.add((rule.code, mark.node))
            yield rule, mark


def _covered(mark: Mark) -> Iterator[ast.AST]:
    for node in (mark.node, *mark.covers):
        yield from ast.walk(node)


def _finding(rule: Rule, mark: Mark, path: str, lines: list[str]) -> Finding:
    node = mark.node
    assert isinstance(node, ast.expr | ast.stmt | ast.keyword), "a rule marks what has a place"
    line, end = node.lineno, node.end_lineno or node.lineno
    text = lines[line - 1] if line <= len(lines) else ""
    last = lines[end - 1] if end <= len(lines) else ""
    start = _characters(text, node.col_offset)
    stop = _characters(last, node.end_col_offset or node.col_offset)
    return Finding(path, 0, line, start + 1, end, stop + 1, rule.code, mark.why, mark.write, text)


def _characters(line: str, offset: int) -> int:
    """Return the number of characters before an offset in bytes, in which `ast` counts."""
    return len(line.encode()[:offset].decode(errors="ignore"))
