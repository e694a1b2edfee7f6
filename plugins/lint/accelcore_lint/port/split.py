"""Lines with several statements, and blocks of one line, if one statement is a vendor's: one line for each."""

from __future__ import annotations

import re

import libcst as cst

_VENDORS = re.compile(
    r"(torch\.)?(cuda|npu)\.((memory|random)\.)?(manual_seed(_all)?|empty_cache|set_device|reset_\w+|synchronize)\("
)


class Split(cst.CSTTransformer):
    """Transformer of a module. Rules look at whole lines, and find each such statement on a line of its own.

    Attributes:
        added: the first statements of the lines that are new.
    """

    def __init__(self) -> None:
        super().__init__()
        self.added: list[cst.CSTNode] = []

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        if len(updated_node.body) == 1 or not any(map(_is_vendors, updated_node.body)):
            return updated_node
        lines = _lines(updated_node)
        self.added += [line.body[0] for line in lines[1:]]
        return cst.FlattenSentinel(lines)

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        if not any(map(_is_vendors, updated_node.body)):
            return updated_node
        lines = _lines(updated_node)
        self.added += [line.body[0] for line in lines]
        return cst.IndentedBlock(lines)


def _is_vendors(statement: cst.BaseSmallStatement) -> bool:
    return isinstance(statement, cst.Expr) and _VENDORS.match(cst.Module([]).code_for_node(statement)) is not None


def _lines(holder: cst.SimpleStatementLine | cst.SimpleStatementSuite) -> list[cst.SimpleStatementLine]:
    """Return a line for each statement; comments above them stay above the first, one behind them behind the last."""
    bare = [part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for part in holder.body]
    lines = [cst.SimpleStatementLine([part]) for part in bare]
    lines[0] = lines[0].with_changes(leading_lines=getattr(holder, "leading_lines", ()))
    lines[-1] = lines[-1].with_changes(trailing_whitespace=holder.trailing_whitespace)
    return lines
