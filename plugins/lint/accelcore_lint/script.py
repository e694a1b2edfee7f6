"""A parsed script, with an index of its nodes by class: each rule reads only what it looks for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from accelcore_lint.names import Function, Names

N = TypeVar("N", bound=ast.AST)


class Script:
    """A script that was parsed.

    Attributes:
        text: the source.
        tree: the syntax tree.
        names: what names stand for.
    """

    def __init__(self, text: str, tree: ast.Module | None = None) -> None:
        self.text = text
        self.tree = ast.parse(text) if tree is None else tree
        self.names = Names(self.tree)
        self._index: dict[type[ast.AST], list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            self._index.setdefault(type(node), []).append(node)

    def all(self, kind: type[N]) -> Sequence[N]:
        """Return all nodes of one class."""
        return self._index.get(kind, [])  # type: ignore[return-value]  # by the key

    def calls(self, found: Callable[[str], bool]) -> Iterator[tuple[ast.Call, str]]:
        """Yield each call whose function has a dotted name that `found` accepts, with that name."""
        for call in self.all(ast.Call):
            name = self.names.resolve(call.func)
            if name and found(name):
                yield call, name

    def functions(self) -> Iterator[Function]:
        """Yield the functions and methods of the script."""
        yield from self.all(ast.FunctionDef)
        yield from self.all(ast.AsyncFunctionDef)

    def inside(self, node: ast.AST, kinds: type[N] | tuple[type[N], ...]) -> Iterator[N]:
        """Yield what contains a node and has one of these classes, from the inside, up to its function."""
        for above in self.names.ancestors(node):
            if isinstance(above, kinds):
                yield above
            if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                return


def last_name(node: ast.AST) -> str:
    """Return the last identifier of a name or an attribute, `optimizer` of `self.optimizer`, or ''."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument of a call by its name, or by its position; None if it is not given."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and len(call.args) > position and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return None


def text_of(node: ast.AST | None) -> str:
    """Return a string literal's value; of an f-string what precedes its first blank to fill in; else ''."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0] if node.values else None
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def mentions(node: ast.AST, other: ast.expr) -> bool:
    """Return whether an expression occurs within another, compared as code."""
    wanted = ast.unparse(other)
    return any(type(part) is type(other) and ast.unparse(part) == wanted for part in ast.walk(node))
