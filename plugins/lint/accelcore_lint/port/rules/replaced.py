"""Functions that a test of the project replaces: `mock.patch("torch.cuda.synchronize")`."""

from __future__ import annotations

import libcst as cst
from libcst import matchers

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Left, Rule

_REPLACED = "a test of the project replaces this function by its name: change both"


def _decide(node: cst.SimpleStatementLine | cst.Call | cst.IfExp | cst.UnaryOperation, facts: Facts) -> Left | None:
    replaced = facts.known.replaced
    if not replaced:
        return None
    called = node.test if isinstance(node, cst.IfExp) else node
    called = called.expression if isinstance(called, cst.UnaryOperation) else called
    if isinstance(node, cst.SimpleStatementLine):
        only = node.body[0]
        called = only.value if len(node.body) == 1 and isinstance(only, cst.Expr) else node
        if called is node:
            return None
    calls = matchers.findall(called, matchers.Call()) if isinstance(node, cst.IfExp) else [called]
    if any(isinstance(call, cst.Call) and facts.name(call.func) in replaced for call in calls):
        return Left(_REPLACED, node.children)
    return None


REPLACED = Rule(
    "replaced function",
    "functions that a test of the project replaces",
    (cst.SimpleStatementLine, cst.Call, cst.IfExp, cst.UnaryOperation),
    _decide,
)
