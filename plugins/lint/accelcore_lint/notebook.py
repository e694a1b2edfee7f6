"""The code of a Jupyter notebook, as one script."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from accelcore_lint.files import Problem
from accelcore_lint.finding import Finding

_MAGIC = ("%", "!", "?")


@dataclass(frozen=True)
class Notebook:
    """The code cells of a notebook, joined.

    Attributes:
        text: the script: all cells, one after another, without magic commands.
        places: for each line of it, the number of the code cell and the line in it, both counted from 1.
    """

    text: str
    places: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, data: bytes) -> Notebook:
        """Read a notebook.

        Raises:
            Problem: it is not a notebook of format 4, or not in Python.
        """
        try:
            content = json.loads(data)
            language = content.get("metadata", {}).get("kernelspec", {}).get("language", "python")
            cells = [_source(cell) for cell in content["cells"] if cell["cell_type"] == "code"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Problem(f"it is not a Jupyter notebook of format 4: {error}") from error
        if language != "python":
            raise Problem(f"its language is {language!a}")
        lines, places = [], []
        for number, cell in enumerate(cells, 1):
            foreign = cell.startswith("%%")  # the whole cell is another language's, or timed
            for line, text in enumerate(cell.split("\n"), 1):
                lines.append("" if foreign else _without_magic(text))
                places.append((number, line))
        return cls("\n".join(lines), tuple(places))

    def place(self, finding: Finding) -> Finding:
        """Return a finding of the script with its place in the notebook."""
        cell, line = self.places[finding.line - 1]
        _, end = self.places[min(finding.end_line, len(self.places)) - 1]
        return replace(finding, cell=cell, line=line, end_line=end)


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return "".join(source) if isinstance(source, list) else str(source)


def _without_magic(line: str) -> str:
    bare = line.lstrip()
    return line[: len(line) - len(bare)] + "pass" if bare.startswith(_MAGIC) or line.rstrip().endswith("?") else line
