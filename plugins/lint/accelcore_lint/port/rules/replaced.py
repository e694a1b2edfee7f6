"""Functions that a test of the project replaces: `mock.patch("torch.cuda.synchronize")`."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Left, Rewrite, Rule
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.walk import find

REPLACED_BY_TEST = "a file of the project, such as a test, replaces this function: change both"


def _decide(node: cst.SimpleStatementLine | cst.Call | cst.IfExp, facts: Facts) -> Left | None:
    replaced = facts.known.replaced
    if not replaced:
        return None
    called = node.test if isinstance(node, cst.IfExp) else node
    if isinstance(node, cst.SimpleStatementLine):
        only = node.body[0]
        called = only.value if len(node.body) == 1 and isinstance(only, cst.Expr) else node
        if called is node:
            return None
    calls = find(called, cst.Call) if isinstance(node, cst.IfExp) else [called]
    names = {facts.name(call.func) for call in calls if isinstance(call, cst.Call)} & replaced
    return Left(REPLACED_BY_TEST, node.children) if names and not _is_in_test_without(names, node, facts) else None


def kept_for_test(decision: Rewrite | Left | None, node: cst.BaseExpression, facts: Facts) -> Rewrite | Left | None:
    """Return a decision, which rewrites nothing below a question that stays as a test replaces its function."""
    is_kept = isinstance(decision, Rewrite) and _is_chosen_by_replaced(node, facts)
    return Left(REPLACED_BY_TEST, node.children) if is_kept else decision


def _is_chosen_by_replaced(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a node stands below an `if` that stays, as a test replaces the function that it asks."""
    inner = node
    for outer in facts.parents(node) if facts.known.replaced else ():
        if isinstance(outer, cst.If) and inner is outer.body:
            calls = find(outer.test, cst.Call)
            if any(_decide(call, facts) is not None for call in calls):
                return True
        inner = outer
    return False


def _is_in_test_without(names: set[str | None], node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a node is in a test, or decides whether it is skipped, that replaces none of some functions."""
    functions = (outer for outer in facts.parents(node) if isinstance(outer, cst.FunctionDef))
    test = next((function for function in functions if function.name.value.startswith("test")), None)
    last = "|".join(str(name).rpartition(".")[2] for name in names)
    return test is not None and re.search(rf"[\"'.]({last})[\"']", text_of(test)) is None


REPLACED = Rule(
    "replaced function",
    "functions that a test of the project replaces",
    (cst.SimpleStatementLine, cst.Call, cst.IfExp),
    _decide,
)
