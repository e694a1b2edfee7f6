"""A rule: its words, its examples, and the function that finds it in a script."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcore_lint.script import Script


@dataclass(frozen=True)
class Mark:
    """A node that a rule found.

    Attributes:
        node: what is shown as wrong.
        why: what is wrong with it, in one sentence.
        write: what to write instead, in one sentence.
        covers: nodes of which general rules need not speak any more, beside `node`.
    """

    node: ast.AST
    why: str
    write: str
    covers: tuple[ast.AST, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One rule of the linter.

    Attributes:
        code: `ACC` and three digits. The first is the family: 1 one device only, 2 answers as another device, 3 wrong
            on any device.
        name: the name in words, with hyphens.
        about: what the rule finds and why it matters, a paragraph of the page `docs/lint.md`.
        check: finds it in a script.
        found: a script in which the rule must find something; the tests and the page take it from here.
        clean: a script in which it must find nothing.
        general: whether to be quiet where a more special rule has marked the same code.
    """

    code: str
    name: str
    about: str
    check: Callable[[Script], Iterable[Mark]]
    found: str
    clean: str
    general: bool = False

    @property
    def anchor(self) -> str:
        """Where the documentation describes the rule."""
        return f"docs/lint.md#{self.code.lower()}-{self.name}"
