"""Findings as SARIF 2.1.0, which code hosts and editors read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from urllib.parse import quote

from accelcore_lint import __version__
from accelcore_lint.finding import Finding
from accelcore_lint.rules import RULES, UNKNOWN

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def write(findings: Sequence[Finding]) -> str:
    """Return the findings as one SARIF log with one run."""
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
