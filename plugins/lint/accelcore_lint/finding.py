"""One place in a script that a rule found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Finding:
    """One finding of one rule.

    Attributes:
        path: the file as it was named, or `-` for standard input.
        cell: the number of the notebook's code cell, counted from 1; 0 for a script. Lines count within the cell.
        line: the line, counted from 1.
        column: the character within the line, counted from 1.
        end_line: the line where the marked code ends.
        end_column: the character after the marked code, counted from 1.
        code: the rule's code, such as `ACC101`.
        why: one sentence: what is wrong with it.
        write: one sentence: what to write instead.
        text: the line of the script.
    """

    path: str
    cell: int
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    why: str
    write: str
    text: str

    @property
    def place(self) -> str:
        """The place as editors and terminals read it, `train.py:3:5`."""
        cell = f"cell {self.cell}:" if self.cell else ""
        return f"{self.path}:{cell}{self.line}:{self.column}"
