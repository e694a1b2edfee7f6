"""Guards: an `if`, a loop or a decorator, with what it tests, what it runs, and the names that this sets."""

from __future__ import annotations

import re

import libcst as cst
from libcst import matchers

from accelcore_lint.port.syntax import text_of

Test = cst.FunctionDef | cst.ClassDef
"""What a decorator such as `pytest.mark.skipif` may skip."""

Guard = cst.If | cst.IfExp | cst.For | cst.BaseSimpleComp | cst.BooleanOperation | Test
GUARDS = (cst.If, cst.IfExp, cst.For, cst.BaseSimpleComp, cst.BooleanOperation)

_OFF = re.compile(r"[\w.]+?(?:\.|\[[\"'])(\w+)(?:[\"']\])? *= *False\b.*", re.DOTALL)
"""A line that turns a flag of the script off, as `config["use_cuda"] = False`."""


def body_of(guard: Guard) -> cst.CSTNode:
    """Return what runs if the guard allows it."""
    if isinstance(guard, cst.BooleanOperation):
        return guard.right
    return guard.elt if isinstance(guard, cst.BaseSimpleComp) else guard.body


def tests_of(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the conditions under which something runs: of an `if`, or the decorators that may skip a test."""
    if isinstance(node, (cst.If, cst.IfExp)):
        return [node.test]
    made = node.decorators if isinstance(node, (cst.FunctionDef, cst.ClassDef)) else ()
    names = (cst.Name, cst.Attribute)
    return [each.decorator for each in made if "skip" in text_of(each) or isinstance(each.decorator, names)]


def names_in(node: cst.CSTNode) -> set[str]:
    """Return all names in a node."""
    return {cst.ensure_type(name, cst.Name).value for name in matchers.findall(node, matchers.Name())}


def set_in(guard: Guard) -> set[str]:
    """Return the names that what an `if` guards assigns, and that are not set if it does not run."""
    if isinstance(guard, Test | cst.BaseSimpleComp | cst.BooleanOperation):
        return set()
    return _assigned(guard.body) - (_assigned(guard.orelse) if guard.orelse is not None else set())


def turned_off(guard: Guard | None, code: str) -> str:
    """Return the flag that an `if` turns off, by the name by which the file asks it elsewhere; "" if none."""
    off = _OFF.fullmatch(text_of(guard.body).strip()) if isinstance(guard, cst.If) and guard.orelse is None else None
    asked = re.findall(rf"\b\w+\.{off[1]}\b(?! *[(.=])", code) if off else []
    return next((name for name in asked if name not in text_of(cst.ensure_type(guard, cst.If).test)), "")


def _assigned(node: cst.CSTNode) -> set[str]:
    made = matchers.findall(node, matchers.AssignTarget(matchers.Name() | matchers.Attribute()))
    return {text_of(cst.ensure_type(target, cst.AssignTarget).target) for target in made}
