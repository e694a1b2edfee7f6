"""Findings for programs: a list of objects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from accelcore_lint.finding import Finding
from accelcore_lint.rules import RULES


def write(findings: Sequence[Finding]) -> str:
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
