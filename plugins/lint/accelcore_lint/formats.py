"""Findings for programs: JSON, annotations of GitHub's workflows, SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import PurePath
from urllib.parse import quote

from accelcore_lint import __version__
from accelcore_lint.finding import Finding
from accelcore_lint.rules import RULES, UNKNOWN

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON. `cell` is null in a script; lines and columns count from 1."""
    return json.dumps([_entry(finding) for finding in findings], indent=2)


def _entry(finding: Finding) -> dict[str, object]:
    rule = RULES.get(finding.code)
    return {
        "file": finding.path,
        "cell": finding.cell or None,
        "line": finding.line,
        "column": finding.column,
        "end_line": finding.end_line,
        "end_column": finding.end_column,
        "code": finding.code,
        "name": rule.name if rule else None,
        "why": finding.why,
        "write": finding.write,
        "see": rule.anchor if rule else None,
    }


def as_github(findings: Sequence[Finding]) -> str:
    """Return a workflow command of GitHub for each finding."""
    return "\n".join(map(_command, findings))


def _command(finding: Finding) -> str:
    properties = {"file": finding.path, "title": finding.code}
    if finding.cell:  # lines of a cell are no lines of the file
        properties["title"] += f" in cell {finding.cell}, line {finding.line}"
    else:
        properties |= {"line": str(finding.line), "col": str(finding.column), "endLine": str(finding.end_line)}
    shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::warning {shown}::{_escaped(f'{finding.why} {finding.write}')}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(findings: Sequence[Finding]) -> str:
    """Return the findings as SARIF 2.1.0, which code hosts and editors read: one log with one run."""
    rules = [{"id": UNKNOWN, "name": "unknown-code", "shortDescription": {"text": "A comment that ignores nothing."}}]
    for rule in RULES.values():
        rules.append({"id": rule.code, "name": rule.name, "shortDescription": {"text": rule.about}})
    order = {str(rule["id"]): place for place, rule in enumerate(rules)}
    driver = {"name": "accelcore-lint", "version": __version__, "rules": rules}
    results = [_result(finding, order[finding.code]) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(finding: Finding, index: int) -> dict[str, object]:
    place: dict[str, object] = {"artifactLocation": {"uri": _uri(finding.path)}}
    text = f"{finding.why} {finding.write}"
    if finding.cell:  # lines of a cell are no lines of the file
        text = f"Cell {finding.cell}, line {finding.line}: {text}"
    else:
        place["region"] = {
            "startLine": finding.line,
            "startColumn": finding.column,
            "endLine": finding.end_line,
            "endColumn": finding.end_column,
        }
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": "warning",
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: str) -> str:
    pure = PurePath(path)
    return pure.as_uri() if pure.is_absolute() else quote(pure.as_posix(), errors="surrogateescape")


FORMATS: dict[str, Callable[[Sequence[Finding]], str]] = {"json": as_json, "github": as_github, "sarif": as_sarif}
"""The formats of `--format` but `text`, which is for people."""
