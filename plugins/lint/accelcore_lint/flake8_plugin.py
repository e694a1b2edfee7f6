"""The linter as a plugin of flake8."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from accelcore_lint import __version__
from accelcore_lint.lint import check


class Plugin:
    """Checker of flake8, by its tree and its lines."""

    name = "accelcore-lint"
    version = __version__

    def __init__(self, tree: ast.Module, lines: Sequence[str]) -> None:
        self._tree = tree
        self._lines = lines

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield line, column counted from 0, and message of each finding."""
        for finding in check("".join(self._lines), tree=self._tree):
            yield finding.line, finding.column - 1, f"{finding.code} {finding.why} {finding.write}", type(self)
