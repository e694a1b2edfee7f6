"""Removal of statements without their comments: those move to the next statement, or to the end of the block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar, cast

import libcst as cst

from accelcore_lint.port.syntax import code_of, text_of
from accelcore_lint.port.walk import find

_MARK = "__accelcore_removed__"

_VARIABLE = r"(?:environ\[[\"']LOCAL_RANK[\"']\]|getenv\([\"']LOCAL_RANK[\"']\))"
_READ_RANK = re.compile(rf"(?m)^[ \t]*(\w+) = int\(os\.{_VARIABLE}\)[ \t]*\r?$")
_PLAIN = (cst.Comparison, cst.Name, cst.Attribute)
_QUESTION = re.compile(r"torch\.(accelerator|cuda)\.is_available\(\)")

Block = TypeVar("Block", cst.Module, cst.IndentedBlock)


def removed(statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Return what stands for a removed statement until `sweep`."""
    return statement.with_changes(body=[cst.Expr(cst.Name(_MARK))])


def removed_suite(suite: cst.SimpleStatementSuite) -> cst.IndentedBlock:
    """Return what stands for the statement of `if test: statement` until `sweep`."""
    return cst.IndentedBlock([removed(cst.SimpleStatementLine(suite.body))])


def is_removed(statement: cst.CSTNode) -> bool:
    """Return whether a statement was removed."""
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.Name)
        and statement.body[0].value.value == _MARK
    )


def sweep(module: cst.Module) -> cst.Module:
    """Delete the removed statements of a module. A block that becomes empty gets `pass`."""
    return module.visit(_Sweep())


def without_unused(module: cst.Module, name: str) -> cst.Module:
    """Delete the lines that assign a name which the rest of their block does not use: what used it was removed."""
    return module.visit(_Unused(name)) if f"{name} = " in code_of(module) else module


def without_ranks(module: cst.Module, before: cst.Module, taken: Collection[str]) -> cst.Module:
    """Delete the lines that read a rank from the launcher's variables for lines that were removed.

    They raise an error without a launcher, which the rest of the script may not need. `taken`: names that others use.
    """
    reads = Counter(_READ_RANK.findall(code_of(module)))
    for name in sorted(set(reads) - set(taken)):
        uses = re.compile(rf"\b{name}\b|(?<![\w.])(?:locals|globals|vars|eval|exec)\(")
        used = len(uses.findall(code_of(module)))
        if used == reads[name] and used < len(uses.findall(code_of(before))):
            module = module.visit(_Unused(name))
    return module


def without_backend(module: cst.Module, name: str) -> cst.Module:
    """Delete the lines that select a backend which nothing uses: the questions that needed it were removed."""
    made = sum(text_of(each.target) == name for each in find(module, cst.AssignTarget))
    if made == 0 or sum(each.value == name for each in find(module, cst.Name)) > made:
        return module
    module = module.visit(_Backend(f"{name} = "))
    used = sum(each.value == "accelcore" for each in find(module, cst.Name))
    return module.visit(_Backend("import accelcore")) if used == 1 else module


class _Blocks(cst.CSTTransformer):
    """Goes into blocks, and not into lines and conditions."""

    def on_visit(self, node: cst.CSTNode) -> bool:
        return super().on_visit(node) and not isinstance(node, cst.SimpleStatementLine | cst.BaseExpression)


class _Unused(_Blocks):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return self._used(updated_node)

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return self._used(updated_node)

    def _used(self, block: Block) -> Block:
        made = [line for line in block.body if self._makes(line)]
        if not made or sum(each.value == self._name for each in find(block, cst.Name)) > len(made):
            return block
        kept = [line for line in block.body if line not in made]
        return block.with_changes(body=kept or [cst.SimpleStatementLine([cst.Pass()])])

    def _makes(self, line: cst.CSTNode) -> bool:
        made = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
        return isinstance(made, cst.Assign) and [text_of(target.target) for target in made.targets] == [self._name]


class _Backend(_Blocks):
    """Deletes lines with a beginning, and the conditions that hold nothing else."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        gone = text_of(original_node.with_changes(leading_lines=[])).startswith(self._beginning)
        return cst.RemoveFromParent() if gone else updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        return updated_node if updated_node.body.body else cst.RemoveFromParent()


class _Sweep(_Blocks):
    def __init__(self) -> None:
        super().__init__()
        self._elifs: set[cst.CSTNode] = set()

    def visit_If(self, node: cst.If) -> None:
        if isinstance(node.orelse, cst.If):
            self._elifs.add(node.orelse)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        return _swept(updated_node)

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.BaseStatement:
        """Remove a condition with nothing under it, if its test only asks."""
        last, new = original_node.orelse, updated_node.orelse
        is_empty_else = isinstance(last, cst.Else) and _is_empty(last.body)
        if new is not None and (is_removed(new) or (is_empty_else and not _has_comment(new))):
            updated_node = updated_node.with_changes(orelse=None)
        empty = _is_empty(original_node.body) and not _has_comment(updated_node)
        if original_node in self._elifs and any(line.comment for line in updated_node.leading_lines):
            return updated_node
        if not empty or updated_node.orelse is not None or not _is_plain(updated_node.test):
            return updated_node
        line = cst.SimpleStatementLine([cst.Pass()], leading_lines=updated_node.leading_lines)
        return removed(line)

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> cst.BaseStatement:
        """Remove a `try` of nothing, whose handlers never run."""
        if not _vanishes(original_node):
            return updated_node
        return removed(cst.SimpleStatementLine([cst.Pass()], leading_lines=updated_node.leading_lines))

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> cst.BaseSuite:
        return _swept(updated_node)


def _is_plain(test: cst.BaseExpression) -> bool:
    """Return whether a condition only asks, so that it can go with all that it guards."""
    if isinstance(test, cst.BooleanOperation):
        return _is_plain(test.left) and _is_plain(test.right)
    if isinstance(test, cst.UnaryOperation):
        return _is_plain(test.expression)
    return isinstance(test, _PLAIN) or _QUESTION.fullmatch(text_of(test)) is not None


def _is_empty(body: cst.BaseSuite) -> bool:
    return isinstance(body, cst.IndentedBlock) and all(map(_vanishes, body.body))


def _vanishes(statement: cst.CSTNode) -> bool:
    """Return whether nothing is left of a statement: it was removed, or is a `try` of nothing."""
    only = isinstance(statement, cst.Try) and statement.orelse is None and statement.finalbody is None
    is_try = only and _is_empty(cst.ensure_type(statement, cst.Try).body)
    return is_removed(statement) or (is_try and not _has_comment(cst.ensure_type(statement, cst.Try)))


def _has_comment(node: cst.If | cst.Else | cst.Try) -> bool:
    """Return whether there is a comment in a statement."""
    return "#" in cst.Module([]).code_for_node(node.with_changes(leading_lines=[]))


def _swept(block: Block) -> Block:
    if not any(is_removed(statement) for statement in block.body):
        return block
    kept: list[cst.CSTNode] = []
    waiting: list[cst.EmptyLine] = []
    for statement in block.body:
        if is_removed(statement):
            gone = cast("cst.SimpleStatementLine", statement)
            comment = gone.trailing_whitespace.comment
            has_comment = any(line.comment for line in gone.leading_lines)
            blank = [line for line in gone.leading_lines if not line.comment]
            waiting += gone.leading_lines if has_comment or not kept else blank
            if comment is not None:
                waiting.append(cst.EmptyLine(comment=comment))
        elif waiting:
            own = cast("cst.SimpleStatementLine", statement)
            lines = _merged(waiting, own.leading_lines)
            kept.append(own.with_changes(leading_lines=lines))
            waiting = []
        else:
            kept.append(statement)
    if not kept and isinstance(block, cst.IndentedBlock):
        kept.append(cst.SimpleStatementLine([cst.Pass()]))
    footer = [*(line for line in waiting if line.comment), *block.footer]
    return block.with_changes(body=kept, footer=footer)


def _merged(waiting: Sequence[cst.EmptyLine], own: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Join the lines above two statements, without blank lines twice."""
    if any(line.comment for line in waiting):
        return [*waiting, *own]
    blanks = next((number for number, line in enumerate(own) if line.comment), len(own))
    return [*waiting[blanks:], *own]
