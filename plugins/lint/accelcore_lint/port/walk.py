"""Walks over a tree that only read it: libcst's own visit makes each node again, which takes most of its time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import libcst as cst

_SPACE = re.compile(
    r".*whitespace.*|lines_after_\w+|leading_lines|footer|header|comma|dot|equal|semicolon|[lr](brace|bracket|par)"
)
"""Parts that are spaces, comments and punctuation."""

_OPTIONAL = {"format_spec"}
"""A part that libcst only visits where it is given; it is the last one."""

_parts: dict[type[cst.CSTNode], tuple[str, ...]] = {}
"""Names of the parts of each class of nodes, in the order of the source."""

Node = TypeVar("Node", bound=cst.CSTNode)


class _Order(cst.CSTVisitor):
    """Learns the order in which libcst visits the parts of a node."""

    def __init__(self, node: cst.CSTNode) -> None:
        super().__init__()
        self._node = node
        self.found: list[str] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node is self._node

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        if node is self._node and not _SPACE.fullmatch(attribute):
            self.found.append(attribute)


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """Return the parts of a node in the order of the source, without spaces, comments and punctuation."""
    kind = type(node)
    if (names := _parts.get(kind)) is None:
        order = _Order(node)
        node.visit(order)
        names = _parts[kind] = (*order.found, *(_OPTIONAL & {*kind.__dataclass_fields__} - {*order.found}))
    found: list[cst.CSTNode] = []
    for name in names:
        value = getattr(node, name)
        if isinstance(value, (tuple, list)):
            found += value
        elif value is not None and not isinstance(value, (str, cst.MaybeSentinel)):
            found.append(value)
    return found


def walk(node: cst.CSTNode, visitor: cst.CSTVisitor) -> None:
    """Show a node and the parts of it to a visitor, as `node.visit(visitor)` does."""
    if visitor.on_visit(node):
        for child in children(node):
            walk(child, visitor)
    visitor.on_leave(node)


def find(node: cst.CSTNode, kind: type[Node]) -> Iterator[Node]:
    """Yield the nodes of a class in a node, and the node itself if it is one, in the order of the source."""
    stack = [node]
    while stack:
        each = stack.pop()
        if isinstance(each, kind):
            yield each
        stack += reversed(children(each))
