"""Numbers of devices in arithmetic that fails if there are none: on the CPU, it counts one."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Rewrite
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.syntax import text_of

_SIZE = re.compile(r"(?i)batch|learning_?rate|samples_per_(gpu|device)|(?<![^\W_])(bs|bsz|lr)(?![^\W_])")
"""Names of what must not be 0: torch refuses a batch of no samples, and a learning rate of 0 trains nothing."""

_DIVIDES = (cst.Modulo, cst.Divide, cst.FloorDivide)


def needs_one(node: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a number of devices divides, or multiplies a batch size or a learning rate: 0 fails."""
    inner: cst.CSTNode = node
    for outer in facts.parents(node):
        if isinstance(outer, cst.AugAssign):
            multiplies = isinstance(outer.operator, cst.MultiplyAssign) and _SIZE.search(text_of(outer.target))
            return bool(multiplies) or isinstance(outer.operator, (cst.DivideAssign, cst.FloorDivideAssign))
        if not isinstance(outer, cst.BinaryOperation):
            return inner is not node and _is_size(inner, outer)
        if isinstance(outer.operator, _DIVIDES) and outer.right is inner:
            return not _is_text(outer.left, facts)  # `"%d GPUs" % n`
        if not isinstance(outer.operator, cst.Multiply):
            return False
        if _SIZE.search(text_of(outer.left if outer.right is inner else outer.right)):
            return True
        inner = outer
    return False


def _is_text(node: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an expression is a text, or a name or a sum of one."""
    if isinstance(node, cst.BinaryOperation):
        return _is_text(node.left, facts) or _is_text(node.right, facts)
    values = [node, *facts.values(node)]
    return any(isinstance(value, (cst.SimpleString, cst.ConcatenatedString, cst.FormattedString)) for value in values)


def _is_size(product: cst.CSTNode, holder: cst.CSTNode) -> bool:
    """Return whether a product is assigned to the name of a batch's size or of a learning rate, or given as one."""
    if isinstance(holder, cst.Assign):
        return any(_SIZE.search(text_of(target.target)) for target in holder.targets)
    return isinstance(holder, cst.Arg) and holder.keyword is not None and bool(_SIZE.search(holder.keyword.value))


def at_least_one(node: cst.Name | cst.Attribute, facts: Facts) -> Rewrite | None:
    """Write `max(n, 1)` for a name of the number of devices, if 0 fails there."""
    if "device_count" not in facts.code or not needs_one(node, facts):
        return None
    text, around = text_of(node), [*facts.parents(node)]
    asked = (outer.test for outer in around if isinstance(outer, (cst.If, cst.IfExp)))
    if facts.guards(node) or any(re.search(rf"(?<![\w.]){re.escape(text)}\b", text_of(test)) for test in asked):
        return None
    values = facts.values_at(node)
    is_count = any(_may_be_zero(value, facts) for value in values)
    is_count = is_count and all(_may_be_zero(value, facts) or facts.is_whole(value) for value in values)
    return whole(node, f"max({text}, 1)") if is_count else None


def _may_be_zero(value: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a value is the number of devices, which is 0 on the CPU."""
    if isinstance(value, cst.IfExp):
        is_count = "device_count(" in text_of(value.body)  # and no rank
        return (is_count and text_of(value.orelse) == "0") or any(
            _may_be_zero(each, facts) for each in (value.body, value.orelse)
        )
    is_count = isinstance(value, cst.Call) and facts.name(value.func) == "torch.cuda.device_count"
    return is_count and not facts.guards(value)
