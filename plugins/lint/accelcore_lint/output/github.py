"""Findings as annotations of GitHub's workflows."""

from __future__ import annotations

from collections.abc import Sequence

from accelcore_lint.finding import Finding


def write(findings: Sequence[Finding]) -> str:
    """Return a workflow command for each finding."""
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
